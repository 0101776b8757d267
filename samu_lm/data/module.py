"""The data module: reads a corpus, holds out documents, and serves packed rows from a position that is one number."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch

from samu_lm.data.corpus import PACKINGS, Corpus, SplitSize
from samu_lm.data.files import launch_path
from samu_lm.data.loader import PackedLoader, TrainLoader
from samu_lm.data.restore import require_same_tokenizer
from samu_lm.data.sources import Source
from samu_lm.data.store import TokenStore, load_stores
from samu_lm.data.tokenizers import Tokenizer
from samu_lm.errors import ConfigError

log = logging.getLogger(__name__)


class ByteEntropy(NamedTuple):
    """Entropy of a text's bytes taken one by one."""

    nats: float
    bits: float


class LMDataModule(L.LightningDataModule):
    """A corpus as packed batches, for training and validation.

    Training goes through the documents epoch by epoch, each epoch in an order that is a pure function of (seed, epoch);
    a mixture draws its rows from several sources (`mixture.py`). The position is ``rows_consumed``, counted over all
    ranks; the loader starts there, whatever the batch size, the number of ranks or of workers was before. Validation
    reads the held-out documents in the source's order.

    Args:
        source: where documents come from.
        tokenizer: a BPE tokenizer that is not trained yet is trained on the training documents in ``setup``.
        seq_len: tokens a row, at least 2.
        batch_size: rows a batch on each rank.
        seed: decides the order of the training documents.
        val_fraction: part of the documents held out, between 0 and 1.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        cache_dir: folder for the tokenized corpus, which is then mapped from there; None keeps it in memory.
        packing: of the training rows: "concat" (documents end to end, cut where a row ends) or "best_fit" (no document
            cut unless longer than a row, rows padded). Held-out documents always stand end to end.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        cache_dir: str | None = None,
        packing: str = "concat",
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.cache_dir = None if cache_dir is None else str(launch_path(cache_dir))
        self.packing = packing
        self.rows_consumed = 0
        self._stream: dict[str, Any] | None = None
        self._saved_stream: dict[str, Any] | None = None
        self._corpus: Corpus | None = None

    def check(self) -> None:
        """Refuses settings that cannot work, before data is read.

        Raises:
            ConfigError: names the key under ``data.`` or ``tokenizer.``.
        """
        for key, least, why in (
            ("seq_len", 2, "a row needs at least 2 tokens, one to read and one to predict"),
            ("batch_size", 1, "a batch needs at least 1 row"),
            ("num_workers", 0, "0 prepares batches in the training process, more in so many others"),
        ):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"data.{key}", value, f"give a whole number, {least} or more: {why}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError("seed", self.seed, "give a whole number")
        fraction = self.val_fraction
        if not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise ConfigError("data.val_fraction", fraction, "give a number between 0 and 1, both excluded")
        if self.packing not in PACKINGS:
            raise ConfigError("data.packing", self.packing, "choose concat or best_fit")
        self.tokenizer.check()
        self.source.check()
        for source in self.source.parts().values():
            if (own := source.tokenizer()) is not None:
                require_same_tokenizer(self.tokenizer, own, source.name()[1])

    def prepare_data(self) -> None:
        """Fills the cache, on one process a machine; without ``cache_dir`` there is nothing to prepare."""
        if self.cache_dir is not None:
            self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Reads and tokenizes the corpus once, trains the tokenizer where it must, and splits the documents.

        Raises:
            ConfigError: as ``check``; a fault in the corpus; a split without documents or targets on one side.
        """
        if self._corpus is not None:
            return
        self.check()
        stores = load_stores(self.source, self.tokenizer, self.val_fraction, self.cache_dir)
        weights = self.source.weights()
        corpus = Corpus(stores, weights, self.val_fraction, self.seq_len, self.packing, self.seed)
        for split, title in (("train", "training"), ("val", "validation")):
            if corpus.size(split).targets == 0:
                remedy = f"no {title} document has 2 tokens, so there is nothing to predict; use longer documents"
                raise ConfigError(*self.source.name(), remedy)
        stream = {"tokenizer": self.tokenizer.fingerprint()} | corpus.identity()
        self._check_stream(stream)
        self._corpus, self._stream = corpus, stream
        train, val = self.size("train"), self.size("val")
        log.info(
            "data: %d training documents (%d tokens, %d rows), %d held out (%d tokens); left out: %d empty, %d faulty",
            *(train.documents, train.tokens, self.rows_per_epoch, val.documents, val.tokens),
            *(sum(s.num_empty for s in stores.values()), sum(s.num_skipped for s in stores.values())),
        )
        corpus.plan(self.epoch)
        shares = self.packing_shares()
        log.info(
            "data.packing=%s: %.2f%% of an epoch's documents cut, %.2f%% of its row tokens padding",
            *(self.packing, 100 * shares["data/cut_documents"], 100 * shares["data/padding"]),
        )

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def corpus(self) -> Corpus:
        """The tokenized, split and packed corpus; raises RuntimeError before ``setup``."""
        if self._corpus is None:
            raise RuntimeError("the corpus is not read yet; call setup() first")
        return self._corpus

    @property
    def store(self) -> TokenStore:
        """The tokenized corpus, of a mixture the first source's; raises RuntimeError before ``setup``."""
        return self.corpus.stores[0]

    def size(self, split: str) -> SplitSize:
        """Size of ``"train"`` or ``"val"``, each document once."""
        return self.corpus.size(split)

    def packing_shares(self) -> dict[str, float]:
        """Shares of the epoch that is read, as metrics: documents that are cut, row tokens that are pads."""
        packing = self.corpus.latest_packing
        return {
            "data/cut_documents": packing.cut_documents / max(1, packing.documents),
            "data/padding": packing.padding_tokens / max(1, packing.row_tokens),
        }

    @property
    def num_train_documents(self) -> int:
        """Documents to train on."""
        return self.size("train").documents

    @property
    def num_train_tokens(self) -> int:
        """Tokens of the training documents, BOS and EOS included."""
        return self.size("train").tokens

    @property
    def num_train_bytes(self) -> int:
        """Bytes of text of the training documents."""
        return self.size("train").bytes

    @property
    def num_val_documents(self) -> int:
        """Documents held out."""
        return self.size("val").documents

    @property
    def num_val_tokens(self) -> int:
        """Tokens of the held-out documents, BOS and EOS included."""
        return self.size("val").tokens

    @property
    def num_val_bytes(self) -> int:
        """Bytes of text of the held-out documents."""
        return self.size("val").bytes

    def byte_unigram_entropy(self, split: str = "val") -> ByteEntropy:
        """Entropy per byte of a split's text under its own byte frequencies, in nats and bits.

        No model that predicts each byte from a fixed distribution does better, so a model that uses context must. Reads
        the corpus again: the text is not kept.
        """
        counts = np.zeros(256, dtype=np.int64)
        for text in self._texts(split):
            counts += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
        p = counts[counts > 0] / counts.sum()
        nats = float(-(p * np.log(p)).sum())
        return ByteEntropy(nats, nats / float(np.log(2.0)))

    def _texts(self, split: str) -> Iterator[bytes]:
        self.size(split)
        for source, documents in zip(self.source.parts().values(), self.corpus.documents[split], strict=True):
            yield from source.selected(documents)

    # --- position ------------------------------------------------------------------------------------------------

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every training document once, of a mixture at least once; the same in every epoch."""
        return self.corpus.rows_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch of the next row."""
        return self.rows_consumed // self.rows_per_epoch

    def advance(self, rows: int) -> None:
        """Counts a batch as used. Called once per training batch, on every rank.

        Args:
            rows: rows of the global batch, ``batch_size`` times the number of ranks. The pad rows that fill an epoch's
                last batch are no rows of the data: the position stops at the epoch's end.
        """
        if rows < 0:
            raise ValueError(f"rows={rows}: the position only moves forward")
        self.rows_consumed += min(rows, self.rows_per_epoch - self.rows_consumed % self.rows_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, ``rows_consumed``, and after ``setup`` what it counts in (``stream``), to check a resume by."""
        state: dict[str, Any] = {"rows_consumed": self.rows_consumed}
        stream = self._stream if self._stream is not None else self._saved_stream
        return state if stream is None else {**state, "stream": dict(stream)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a position over.

        Raises:
            ConfigError: the position was counted in other rows, e.g. with another ``data.seq_len``.
        """
        self.rows_consumed = int(state["rows_consumed"])
        self._saved_stream = state.get("stream")
        self._check_stream(self._stream)

    def _check_stream(self, stream: dict[str, Any] | None) -> None:
        if stream is None or self._saved_stream is None:
            return
        for name, saved in ({"packing": "concat", "weights": None} | self._saved_stream).items():
            if stream.get(name) == saved:
                continue
            key, value = {
                "seq_len": ("data.seq_len", self.seq_len),
                "packing": ("data.packing", self.packing),
                "weights": ("data.weights", stream.get("weights")),
                "seed": ("seed", self.seed),
                "tokenizer": ("tokenizer", self.tokenizer.kind),
            }.get(name, self.source.name())
            plain = name in ("seq_len", "seed", "packing", "weights")
            other = f"{name} {saved}" if plain else f"other {name.removesuffix('s')}s"
            remedy = f"the checkpoint stopped at row {self.rows_consumed} of a run with {other}; resume with the same"
            raise ConfigError(key, value, f"{remedy}, or start a new run")

    # --- loaders -------------------------------------------------------------------------------------------------

    def _loader_options(self) -> dict[str, Any]:
        rank, world_size = self._rank()
        return {
            "tokens": self.corpus.tokens,
            "rank": rank,
            "world_size": world_size,
            "batch_size": self.batch_size,
            "pad_id": self.tokenizer.pad_id,
            "num_workers": self.num_workers,
        }

    def _rank(self) -> tuple[int, int]:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        return 0, 1

    def train_dataloader(self) -> TrainLoader:
        """Training batches of this rank, from ``rows_consumed`` to the end of that epoch."""
        return TrainLoader(
            state=self.state_dict,
            load=self.load_state_dict,
            plan=self.corpus.plan,
            num_rows=self.rows_per_epoch,
            position=lambda: self.rows_consumed,
            **self._loader_options(),
        )

    def val_dataloader(self) -> PackedLoader:
        """Validation batches of this rank: the held-out documents in the source's order, the same each time."""
        return self.sequential_dataloader("val")

    def sequential_dataloader(self, split: str) -> PackedLoader:
        """Batches of a split as it stands: documents in the source's order, end to end, rows as they come."""
        plan = self.corpus.sequential(split)
        return PackedLoader(
            plan=lambda epoch, first_row: plan,
            num_rows=plan.num_rows,
            position=lambda: 0,
            **self._loader_options(),
        )
