"""Which token stands where: documents end to end in an order that is a pure function of (seed, epoch), cut into rows.

The stream of an epoch is every document once, end to end. Its ``i``-th cut is positions ``i*S`` to ``(i+1)*S`` (S =
``seq_len``). Training takes the cuts in an order of their own, again a pure function of (seed, epoch): otherwise the
rows of a batch, and of many batches in turn, would come from one long document. Any row is found by two look-ups, and
nothing has to be remembered but a row number. Token positions never enter a Python loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samu_lm.data.batch import Batch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit integers, modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permutation(size: int, seed: int, epoch: int, stream: int) -> NDArray[np.int64]:
    """0 to ``size - 1``, sorted by a hash of (seed, epoch, stream, index).

    NumPy's generators promise no stable stream between their versions; integer arithmetic does, so an order found
    today is found again after an upgrade.
    """
    start = np.array([seed & _MASK], dtype=np.uint64)
    start = _mix(_mix(start + np.uint64(_GOLDEN)) + np.array([epoch & _MASK], dtype=np.uint64) * np.uint64(_GOLDEN))
    if stream:
        start = _mix(start ^ np.uint64(stream))
    keys = _mix(start + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(keys, kind="stable")


def document_order(num_documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of the documents in an epoch's stream: ``[num_documents]`` int64, a permutation."""
    return _permutation(num_documents, seed, epoch, stream=0)


def row_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch's rows are trained on: ``[num_rows]`` int64, a permutation."""
    return _permutation(num_rows, seed, epoch, stream=1)


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Where each row of a stream of documents lies in a flat token array.

    Attributes:
        starts: ``[N]`` int64, where the stream's k-th document begins in the flat array.
        bounds: ``[N + 1]`` int64, where it begins in the stream; the last entry is the stream's length.
        seq_len: tokens a row.
        order: ``[num_rows]`` int64, which cut of the stream each row is; None takes them as they come.
    """

    starts: NDArray[np.int64]
    bounds: NDArray[np.int64]
    seq_len: int
    order: NDArray[np.int64] | None = None

    @classmethod
    def build(cls, offsets: NDArray[np.int64], documents: NDArray[np.int64], seq_len: int) -> RowPlan:
        """The plan of a stream, its rows as they come.

        Args:
            offsets: ``[M + 1]`` int64, document m is ``tokens[offsets[m]:offsets[m + 1]]``.
            documents: ``[N]`` int64, the stream's documents in order. Those without tokens take no place.
            seq_len: tokens a row, at least 2.
        """
        if seq_len < 2:
            raise ValueError(f"seq_len={seq_len}: a row needs at least 2 tokens, one to read and one to predict")
        starts = offsets[documents]
        lengths = offsets[documents + 1] - starts
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        bounds = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        return cls(starts, bounds, seq_len)

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.bounds[-1])

    @property
    def num_rows(self) -> int:
        """Rows that hold the stream; the last one may be padded."""
        return -(-self.num_tokens // self.seq_len)

    def shuffled(self, seed: int, epoch: int) -> RowPlan:
        """The same rows in the order of training."""
        return replace(self, order=row_order(self.num_rows, seed, epoch))

    def rows(self, tokens: NDArray[Any], first: int, count: int, pad_id: int) -> Batch:
        """Rows ``first`` to ``first + count``; rows past the end are all pad and have no target.

        A token's target is the next token of the stream where that belongs to the same document, also when it lies in
        the next row, so that packing loses no target.

        Args:
            tokens: the flat array, any integer type.
            first: first row, at least 0.
            count: number of rows.
            pad_id: stands where there is no token or no target.

        Returns:
            A batch of shape ``[count, seq_len]``.
        """
        cut = np.arange(first, first + count, dtype=np.int64)
        if self.order is not None:
            inside = cut < self.num_rows
            cut[inside] = self.order[cut[inside]]
        place = (cut[:, None] * self.seq_len + np.arange(self.seq_len)).reshape(-1)
        live = place < self.num_tokens
        position = place[live]
        document = np.searchsorted(self.bounds, position, side="right") - 1
        source = self.starts[document] + (position - self.bounds[document])
        has_target = position + 1 < self.bounds[document + 1]

        inputs = np.full(len(place), pad_id, dtype=np.int64)
        targets = np.full(len(place), pad_id, dtype=np.int64)
        inputs[live] = tokens[source]
        loss_mask = live.copy()
        loss_mask[live] = has_target
        targets[loss_mask] = tokens[source[has_target] + 1]
        reset = place == self.num_tokens  # the first pad, so that no document's state runs into the padding
        reset[live] = position == self.bounds[document]
        reset[:: self.seq_len] = True
        shape = (count, self.seq_len)
        return Batch(*(torch.from_numpy(a.reshape(shape)) for a in (inputs, targets, reset, loss_mask)))


def pack_documents(documents: Sequence[Any], seq_len: int, pad_id: int = 0) -> Batch:
    """Packs documents end to end, in the order given, into as few rows as hold them.

    Args:
        documents: token ids, one sequence or array of integers a document; empty ones are dropped.
        seq_len: tokens a row, at least 2.
        pad_id: fills the last row.

    Returns:
        A batch of ``[ceil(tokens / seq_len), seq_len]``.

    Raises:
        ValueError: ``seq_len`` below 2.
    """
    arrays = [np.asarray(d, dtype=np.int64).reshape(-1) for d in documents]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    plan = RowPlan.build(offsets, np.arange(len(arrays), dtype=np.int64), seq_len)
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
    return plan.rows(tokens, 0, plan.num_rows, pad_id)
