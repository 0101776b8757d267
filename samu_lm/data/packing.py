"""Which token stands where: documents end to end in an order that is a pure function of (seed, epoch), cut into rows.

The stream of an epoch is every document once, end to end. Its ``i``-th cut is positions ``i*S`` to ``(i+1)*S`` (S =
``seq_len``). Training takes the cuts in an order of their own, again a pure function of (seed, epoch): otherwise the
rows of a batch, and of many batches in turn, would come from one long document. Any row is found by two look-ups, and
nothing has to be remembered but a row number. Token positions never enter a Python loop.

`best_fit.py` fills rows without cutting documents, `mixture.py` draws rows of several corpora; both hand their rows'
segments to `fill_rows` here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from samu_lm.data.batch import Batch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit integers, modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def order_keys(indices: NDArray[np.uint64], seed: int, epoch: int, stream: int) -> NDArray[np.uint64]:
    """A hash of (seed, epoch, stream, index) for each index; sorting by it shuffles.

    NumPy's generators promise no stable stream between their versions; integer arithmetic does, so an order found
    today is found again after an upgrade.
    """
    start = np.array([seed & _MASK], dtype=np.uint64)
    start = mix64(mix64(start + np.uint64(_GOLDEN)) + np.array([epoch & _MASK], dtype=np.uint64) * np.uint64(_GOLDEN))
    if stream:
        start = mix64(start ^ np.uint64(stream))
    return mix64(start + (indices + np.uint64(1)) * np.uint64(_GOLDEN))


def _permutation(size: int, seed: int, epoch: int, stream: int) -> NDArray[np.int64]:
    return np.argsort(order_keys(np.arange(size, dtype=np.uint64), seed, epoch, stream), kind="stable")


def document_order(num_documents: int, seed: int, epoch: int, part: int = 0) -> NDArray[np.int64]:
    """The order of the documents in an epoch's stream: ``[num_documents]`` int64, a permutation.

    ``part`` numbers the sources of a mixture, which are shuffled independently.
    """
    return _permutation(num_documents, seed, epoch, stream=2 * part)


def row_order(num_rows: int, seed: int, epoch: int, part: int = 0) -> NDArray[np.int64]:
    """The order in which an epoch's rows are trained on: ``[num_rows]`` int64, a permutation; ``part`` as above."""
    return _permutation(num_rows, seed, epoch, stream=2 * part + 1)


def compact_index(indices: NDArray[Any], size: int) -> NDArray[Any]:
    """The same numbers, all below ``size``, in four bytes each where they fit."""
    return indices.astype(np.int32 if size < 2**31 else np.int64, copy=False)


class Segments(NamedTuple):
    """Pieces of documents that lie in some rows, in reading order: P pieces.

    Attributes:
        row: ``[P]`` int64, which of the rows asked for holds it, rising.
        start: ``[P]`` int64, where it begins in the tokens.
        length: ``[P]`` int64, at least 1; the pieces of a row are together no longer than a row.
        begins: ``[P]`` bool, whether it holds its document's first token.
        ends: ``[P]`` bool, whether it holds its document's last token.
    """

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]


class Packing(NamedTuple):
    """What a packing does to the documents of one epoch.

    Attributes:
        documents: documents with tokens.
        cut_documents: of these, those that lie in more than one row.
        row_tokens: rows times their length.
        padding_tokens: of these, pads.
    """

    documents: int
    cut_documents: int
    row_tokens: int
    padding_tokens: int


def gather(tokens: Any, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pieces of a token array, or of `ShardTokens`, end to end: int64."""
    if len(starts) == 0:
        return np.zeros(0, dtype=np.int64)
    if hasattr(tokens, "pieces"):
        pieces = tokens.pieces(starts, lengths)
    else:
        flat = np.asarray(tokens)  # a mapped array is sliced much faster as a plain one
        pieces = [flat[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
    return np.concatenate(pieces).astype(np.int64)


def fill_rows(tokens: Any, segments: Segments, count: int, seq_len: int, pad_id: int) -> Batch:
    """A batch of ``count`` rows of ``seq_len`` tokens that hold the segments from their beginning on, then pads.

    A token's target is the next token of its document, also when that lies in another row, so that packing loses no
    target.
    """
    row, start, length, begins, ends = segments
    before = np.cumsum(length) - length  # tokens of earlier segments
    place = row * seq_len + before - before[np.searchsorted(row, row)]  # counted from the row's first segment on
    values = gather(tokens, start, length)
    target = (place - before).repeat(length) + np.arange(len(values))
    last = before + length - 1

    inputs = np.full(count * seq_len, pad_id, dtype=np.int64)
    targets = np.full(count * seq_len, pad_id, dtype=np.int64)
    loss_mask = np.zeros(count * seq_len, dtype=np.bool_)
    reset = np.zeros(count * seq_len, dtype=np.bool_)
    inputs[target] = values
    following = np.append(values[1:], pad_id)
    following[last] = pad_id
    goes_on = ~ends
    following[last[goes_on]] = gather(tokens, (start + length)[goes_on], np.ones(goes_on.sum(), dtype=np.int64))
    targets[target] = following
    loss_mask[target] = True
    loss_mask[target[last[ends]]] = False
    reset[place[begins]] = True
    reset[::seq_len] = True
    used = np.bincount(row, weights=length, minlength=count).astype(np.int64)
    padded = np.flatnonzero(used < seq_len)
    reset[padded * seq_len + used[padded]] = True  # the first pad, so that no document's state runs into the padding
    shape = (count, seq_len)
    return Batch(*(torch.from_numpy(a.reshape(shape)) for a in (inputs, targets, reset, loss_mask)))


def require_row_length(seq_len: int) -> None:
    """Raises ValueError for rows too short to predict anything."""
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len}: a row needs at least 2 tokens, one to read and one to predict")


def spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For runs of ``counts`` numbers from ``first`` on: the run each number belongs to, and the numbers."""
    run = np.arange(len(counts)).repeat(counts)
    return run, (first - np.cumsum(counts) + counts)[run] + np.arange(len(run))


class Plan(ABC):
    """Where each row of an epoch lies in the tokens."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the epoch."""

    @abstractmethod
    def take(self, tokens: Any, rows: NDArray[np.int64], pad_id: int) -> Batch:
        """The rows of these numbers; those past the end are all pad and have no target."""

    @abstractmethod
    def packing(self) -> Packing:
        """What the packing does to the epoch's documents."""

    def rows(self, tokens: Any, first: int, count: int, pad_id: int) -> Batch:
        """Rows ``first`` to ``first + count``; rows past the end are all pad and have no target.

        Args:
            tokens: the flat array, any integer type, or `ShardTokens`.
            first: first row, at least 0.
            count: number of rows.
            pad_id: stands where there is no token or no target.

        Returns:
            A batch of shape ``[count, seq_len]``.
        """
        return self.take(tokens, np.arange(first, first + count, dtype=np.int64), pad_id)


@dataclass(frozen=True, eq=False)
class RowPlan(Plan):
    """Where each row of a stream of documents lies in a flat token array: packing ``concat``.

    Attributes:
        offsets: ``[M + 1]`` int64, document m is ``tokens[offsets[m]:offsets[m + 1]]``.
        documents: ``[N]`` int32 or int64, the stream's documents with tokens, in order.
        bounds: ``[N + 1]`` int64, where each begins in the stream; the last entry is the stream's length.
        seq_len: tokens a row.
        order: ``[num_rows]`` int32 or int64, which cut of the stream each row is; None takes them as they come.
    """

    offsets: NDArray[np.int64]
    documents: NDArray[Any]
    bounds: NDArray[np.int64]
    seq_len: int
    order: NDArray[Any] | None = None

    @classmethod
    def build(cls, offsets: NDArray[np.int64], documents: NDArray[Any], seq_len: int) -> RowPlan:
        """The plan of a stream, its rows as they come.

        Args:
            offsets: ``[M + 1]`` int64, document m is ``tokens[offsets[m]:offsets[m + 1]]``.
            documents: ``[N]`` integers, the stream's documents in order. Those without tokens take no place.
            seq_len: tokens a row, at least 2.
        """
        require_row_length(seq_len)
        lengths = offsets[documents + 1] - offsets[documents]
        if not lengths.all():
            documents, lengths = documents[lengths > 0], lengths[lengths > 0]
        bounds = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        return cls(offsets, documents, bounds, seq_len)

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.bounds[-1])

    @property
    def num_rows(self) -> int:
        """Rows that hold the stream; the last one may be padded."""
        return -(-self.num_tokens // self.seq_len)

    def shuffled(self, seed: int, epoch: int, part: int = 0) -> RowPlan:
        """The same rows in the order of training."""
        order = row_order(self.num_rows, seed, epoch, part)
        return replace(self, order=compact_index(order, self.num_rows))

    def packing(self) -> Packing:
        """What the packing does to the documents: a document is cut where a row ends inside it."""
        cut = self.bounds[:-1] // self.seq_len != (self.bounds[1:] - 1) // self.seq_len
        row_tokens = self.num_rows * self.seq_len
        return Packing(len(self.documents), int(cut.sum()), row_tokens, row_tokens - self.num_tokens)

    def take(self, tokens: Any, rows: NDArray[np.int64], pad_id: int) -> Batch:
        inside = np.flatnonzero(rows < self.num_rows)
        cut = rows[inside] if self.order is None else self.order[rows[inside]].astype(np.int64)
        begin = cut * self.seq_len
        end = np.minimum(begin + self.seq_len, self.num_tokens)
        first = np.searchsorted(self.bounds, begin, side="right") - 1
        last = np.searchsorted(self.bounds, end - 1, side="right") - 1
        row, document = spread(first, last - first + 1)
        head, tail = self.bounds[document], self.bounds[document + 1]
        start, stop = np.maximum(head, begin[row]), np.minimum(tail, end[row])
        source = self.offsets[self.documents[document]] + start - head
        segments = Segments(inside[row], source, stop - start, start == head, stop == tail)
        return fill_rows(tokens, segments, len(rows), self.seq_len, pad_id)


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
