"""A tokenized corpus, split and packed: sizes, the rows of an epoch, and what gives a row number its meaning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.best_fit import BestFitPlan
from samu_lm.data.mixture import ChainedPlan, MixturePlan
from samu_lm.data.packing import Packing, Plan, RowPlan, compact_index, document_order
from samu_lm.data.split import held_out_threshold
from samu_lm.data.store import TokenStore
from samu_lm.errors import ConfigError

PACKINGS = ("concat", "best_fit")
_BLOCK = 1 << 20


class SplitSize(NamedTuple):
    """Size of a split: documents, tokens (BOS and EOS included), bytes of text, targets, rows end to end."""

    documents: int
    tokens: int
    bytes: int
    targets: int
    rows: int


class Corpus:
    """The documents of one or several stores, held out or packed into rows.

    Args:
        stores: the tokenized sources by name.
        weights: each one's weight, whole numbers; None where there is one store, which is then no mixture.
        val_fraction: part of the documents held out, of all stores alike.
        seq_len: tokens a row.
        packing: "concat" or "best_fit", of the training rows; held-out documents always stand end to end.
        seed: decides the order of the training rows.

    Raises:
        ConfigError: fewer than two different documents, or a source of a mixture without training documents.
    """

    def __init__(
        self,
        stores: Mapping[str, TokenStore],
        weights: Sequence[int] | None,
        val_fraction: float,
        seq_len: int,
        packing: str,
        seed: int,
    ) -> None:
        self.stores, self.weights = list(stores.values()), weights
        self.seq_len, self.packing, self.seed = seq_len, packing, seed
        ends = [s.hashes[[i]] for s in self.stores if len(s.hashes) for i in (s.hashes.argmin(), s.hashes.argmax())]
        count = sum(len(store.hashes) for store in self.stores)
        self.threshold = held_out_threshold(np.concatenate(ends), val_fraction, count)
        self.documents: dict[str, list[NDArray[Any]]] = {"train": [], "val": []}
        for store in self.stores:
            is_val = store.hashes < np.uint64(self.threshold)
            for split, chosen in (("train", ~is_val), ("val", is_val)):
                self.documents[split].append(compact_index(np.flatnonzero(chosen), len(chosen)))
        self._sizes = {split: self._size(split) for split in self.documents}
        self._part_rows: list[int] = []
        self._packed: dict[int, BestFitPlan] = {}
        self._latest: tuple[int, Plan] | None = None
        self.latest_packing = Packing(0, 0, 0, 0)  # of the epoch planned last
        if self._sizes["train"].targets:
            self._part_rows = [self._part_plan(k).num_rows for k in range(len(self.stores))]
            for name, rows in zip(stores, self._part_rows, strict=True):
                if not rows:
                    remedy = "has no document to train on (few documents, and those held out); leave it out"
                    raise ConfigError(f"data.sources.{name}", name, remedy)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def size(self, split: str) -> SplitSize:
        """Size of ``"train"`` or ``"val"``, each document once."""
        if split not in self._sizes:
            raise ValueError(f"split={split!r}: choose 'train' or 'val'")
        return self._sizes[split]

    def _size(self, split: str) -> SplitSize:
        totals = np.zeros(4, dtype=np.int64)
        rows = 0
        for store, documents in zip(self.stores, self.documents[split], strict=True):
            tokens = 0
            for start in range(0, len(documents), _BLOCK):  # in blocks: the index may be mapped from a file
                some = documents[start : start + _BLOCK]
                lengths = store.offsets[some + 1] - store.offsets[some]
                tokens += int(lengths.sum())
                totals += (len(some), lengths.sum(), store.num_bytes[some].sum(), (lengths > 0).sum())
            rows += -(-tokens // self.seq_len)
        documents_, tokens_, bytes_, with_tokens = totals.tolist()
        return SplitSize(documents_, tokens_, bytes_, tokens_ - with_tokens, rows)

    @property
    def tokens(self) -> Any:
        """What the plans' ``take`` and ``rows`` take: the tokens, for a mixture those of each source."""
        return self.stores[0].tokens if self.weights is None else [store.tokens for store in self.stores]

    # --- rows ----------------------------------------------------------------------------------------------------

    @property
    def rows_per_epoch(self) -> int:
        """Rows of a training epoch, the same in every epoch."""
        return self._part_rows[0] if self.weights is None else self._mixture(0).num_rows

    def plan(self, epoch: int, first_row: int = 0) -> Plan:
        """The training rows of an epoch, which will be read from ``first_row`` on."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = None  # its memory is free before the next is built
            self._latest = (epoch, self._part_plan(0, epoch) if self.weights is None else self._mixture(epoch))
            self.latest_packing = self._latest[1].packing()
        plan = self._latest[1]
        if isinstance(plan, MixturePlan):
            plan.prepare(first_row)
        return plan

    def _mixture(self, epoch: int) -> MixturePlan:
        assert self.weights is not None
        return MixturePlan(self.weights, self._part_rows, self._part_plan, self.seed, epoch, self.seq_len)

    def _part_plan(self, part: int, epoch: int | None = None) -> RowPlan | BestFitPlan:
        """The rows of one source; without an epoch, as they come."""
        store, documents = self.stores[part], self.documents["train"][part]
        if self.packing == "best_fit":
            if part not in self._packed:
                self._packed[part] = BestFitPlan.build(store.offsets, documents, self.seq_len)
            packed = self._packed[part]
            return packed if epoch is None else packed.shuffled(self.seed, epoch, part)
        if epoch is None:
            return RowPlan.build(store.offsets, documents, self.seq_len)
        order = document_order(len(documents), self.seed, epoch, part)
        return RowPlan.build(store.offsets, documents[order], self.seq_len).shuffled(self.seed, epoch, part)

    def sequential(self, split: str) -> Plan:
        """A split as it stands: documents in the source's order, end to end, rows as they come."""
        self.size(split)
        plans = [
            RowPlan.build(store.offsets, documents, self.seq_len)
            for store, documents in zip(self.stores, self.documents[split], strict=True)
        ]
        return plans[0] if self.weights is None else ChainedPlan(plans, self.seq_len)

    # --- identity ------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What gives a training row's number its meaning, apart from the tokenizer."""
        digest = hashlib.blake2b(digest_size=16)
        for store, documents in zip(self.stores, self.documents["train"], strict=True):
            blocks = [documents[start : start + _BLOCK] for start in range(0, len(documents), _BLOCK)]
            for some in blocks:
                digest.update(store.hashes[some].tobytes())
            for some in blocks:
                digest.update((store.offsets[some + 1] - store.offsets[some]).tobytes())
        own: dict[str, Any] = {"seq_len": self.seq_len, "seed": self.seed, "documents": digest.hexdigest()}
        own["packing"] = self.packing
        if self.weights is not None:
            own["weights"] = ":".join(map(str, self.weights))
        return own
