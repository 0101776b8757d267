"""The data module: reads a corpus, holds out documents, and serves packed rows from a position that is one number."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray

from samu_lm.data.files import launch_path
from samu_lm.data.loader import PackedLoader, TrainLoader
from samu_lm.data.packing import RowPlan, document_order
from samu_lm.data.sources import Source
from samu_lm.data.split import content_hash, held_out, held_out_threshold
from samu_lm.data.store import TokenStore, load_store
from samu_lm.data.tokenizers import Tokenizer
from samu_lm.errors import ConfigError

log = logging.getLogger(__name__)


class ByteEntropy(NamedTuple):
    """Entropy of a text's bytes taken one by one."""

    nats: float
    bits: float


class SplitSize(NamedTuple):
    """Size of a split: documents, tokens (BOS and EOS included), bytes of text, targets, rows."""

    documents: int
    tokens: int
    bytes: int
    targets: int
    rows: int


class LMDataModule(L.LightningDataModule):
    """A corpus as packed batches, for training and validation.

    Training goes through the documents epoch by epoch, each epoch in an order that is a pure function of (seed, epoch).
    The position is ``rows_consumed``, counted over all ranks; the loader starts there, whatever the batch size, the
    number of ranks or of workers was before. Validation reads the held-out documents in the source's order.

    Args:
        source: where documents come from.
        tokenizer: a BPE tokenizer that is not trained yet is trained on the training documents in ``setup``.
        seq_len: tokens a row, at least 2.
        batch_size: rows a batch on each rank.
        seed: decides the order of the training documents.
        val_fraction: part of the documents held out, between 0 and 1.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        cache_dir: folder for the tokenized corpus, which is then mapped from there; None keeps it in memory.
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
        self.rows_consumed = 0
        self._stream: dict[str, Any] | None = None
        self._saved_stream: dict[str, Any] | None = None
        self._store: TokenStore | None = None

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
        self.tokenizer.check()
        self.source.check()

    def prepare_data(self) -> None:
        """Fills the cache, on one process a machine; without ``cache_dir`` there is nothing to prepare."""
        if self.cache_dir is not None:
            self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Reads and tokenizes the corpus once, trains the tokenizer where it must, and splits the documents.

        Raises:
            ConfigError: as ``check``; a fault in the corpus; a split without documents or targets on one side.
        """
        if self._store is not None:
            return
        self.check()
        try:
            self._adopt(load_store(self.source, self.tokenizer, self.val_fraction, self.cache_dir))
        except ConfigError:
            self._store = self._stream = None
            raise
        train, val = self.size("train"), self.size("val")
        log.info(
            "data: %d training documents (%d tokens, %d rows), %d held out (%d tokens); left out: %d empty, %d faulty",
            *(train.documents, train.tokens, train.rows, val.documents, val.tokens),
            *(self.store.num_empty, self.store.num_skipped),
        )

    def _adopt(self, store: TokenStore) -> None:
        is_val = held_out(store.hashes, self.val_fraction)
        self._documents = {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
        self._store = store
        for split, title in (("train", "training"), ("val", "validation")):
            if self.size(split).targets == 0:
                remedy = f"no {title} document has 2 tokens, so there is nothing to predict; use longer documents"
                raise ConfigError(*self.source.name(), remedy)
        self._stream = self._stream_identity()
        self._check_stream()

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def store(self) -> TokenStore:
        """The tokenized corpus; raises RuntimeError before ``setup``."""
        if self._store is None:
            raise RuntimeError("the corpus is not read yet; call setup() first")
        return self._store

    def size(self, split: str) -> SplitSize:
        """Size of ``"train"`` or ``"val"``."""
        documents = self._split(split)
        lengths = np.diff(self.store.offsets)[documents]
        tokens = int(lengths.sum())
        return SplitSize(
            documents=len(documents),
            tokens=tokens,
            bytes=int(self.store.num_bytes[documents].sum()),
            targets=tokens - int((lengths > 0).sum()),
            rows=-(-tokens // self.seq_len),
        )

    def _split(self, split: str) -> NDArray[np.int64]:
        _ = self.store  # the clear error first
        if split not in self._documents:
            raise ValueError(f"split={split!r}: choose 'train' or 'val'")
        return self._documents[split]

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
        self._split(split)
        threshold = held_out_threshold(self.store.hashes, self.val_fraction)
        counts = np.zeros(256, dtype=np.int64)
        for text in self.source.documents():
            if (content_hash(text) < threshold) == (split == "val"):
                counts += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
        p = counts[counts > 0] / counts.sum()
        nats = float(-(p * np.log(p)).sum())
        return ByteEntropy(nats, nats / float(np.log(2.0)))

    # --- position ------------------------------------------------------------------------------------------------

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every training document once; the same in every epoch."""
        return self.size("train").rows

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

    def _stream_identity(self) -> dict[str, Any]:
        """What gives a row number its meaning."""
        documents = self._split("train")
        digest = hashlib.blake2b(self.store.hashes[documents].tobytes(), digest_size=16)
        digest.update(np.diff(self.store.offsets)[documents].tobytes())
        return {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "tokenizer": self.tokenizer.fingerprint(),
            "documents": digest.hexdigest(),
        }

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
        self._check_stream()

    def _check_stream(self) -> None:
        if self._stream is None or self._saved_stream is None:
            return
        for name, saved in self._saved_stream.items():
            if self._stream.get(name) == saved:
                continue
            key, value = {
                "seq_len": ("data.seq_len", self.seq_len),
                "seed": ("seed", self.seed),
                "tokenizer": ("tokenizer", self.tokenizer.kind),
            }.get(name, self.source.name())
            other = f"{name} {saved}" if name in ("seq_len", "seed") else f"other {name.removesuffix('s')}s"
            remedy = f"the checkpoint stopped at row {self.rows_consumed} of a run with {other}; resume with the same"
            raise ConfigError(key, value, f"{remedy}, or start a new run")

    # --- loaders -------------------------------------------------------------------------------------------------

    def _train_plan(self, epoch: int) -> RowPlan:
        documents = self._split("train")
        order = document_order(len(documents), self.seed, epoch)
        return RowPlan.build(self.store.offsets, documents[order], self.seq_len).shuffled(self.seed, epoch)

    def _loader_options(self, split: str) -> dict[str, Any]:
        rank, world_size = self._rank()
        return {
            "num_rows": self.size(split).rows,
            "tokens": self.store.tokens,
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
            plan=self._train_plan,
            position=lambda: self.rows_consumed,
            **self._loader_options("train"),
        )

    def val_dataloader(self) -> PackedLoader:
        """Validation batches of this rank: the held-out documents in the source's order, the same each time."""
        return self.sequential_dataloader("val")

    def sequential_dataloader(self, split: str) -> PackedLoader:
        """Batches of a split as it stands: documents in the source's order, end to end, rows as they come."""
        plan = RowPlan.build(self.store.offsets, self._split(split), self.seq_len)
        return PackedLoader(plan=lambda epoch: plan, position=lambda: 0, **self._loader_options(split))
