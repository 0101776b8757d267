"""Packing ``best_fit``: no document is cut unless it is longer than a row; what stays free in a row is padding.

Best-fit decreasing: documents, longest first, each into the fullest row that still has room for it, a new row where
none has. A document longer than a row gives as many whole rows as it fills; the rest of it is packed like the others.

Which lengths share a row depends on the lengths alone, so every epoch has the same number of rows; which of the
documents of a length takes which place is a pure function of (seed, epoch). The packing is computed on the counts of
lengths, a few NumPy calls for each length, and never in a loop over documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.batch import Batch
from samu_lm.data.packing import (
    Packing,
    Plan,
    Segments,
    compact_index,
    document_order,
    fill_rows,
    require_row_length,
    row_order,
    spread,
)


def best_fit(counts: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Best-fit decreasing of pieces into rows.

    Args:
        counts: ``[capacity + 1]`` int64, how many pieces have each length; none has length 0.
        capacity: length of a row.

    Returns:
        The row of each piece, ``[P]`` int64 with pieces in order of falling length, and the number of rows.
    """
    rows = np.empty(int(counts.sum()), dtype=np.int64)
    free: list[list[NDArray[np.int64]]] = [[] for _ in range(capacity + 1)]  # rows by the room left in them
    has_room = np.zeros(capacity + 1, dtype=np.bool_)
    opened = done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            room = length + int(np.argmax(has_room[length:]))
            if has_room[room]:
                found = free[room].pop()
                has_room[room] = bool(free[room])
            else:
                room = capacity
                found = np.arange(opened, opened - (-left // (capacity // length)))
                opened += len(found)
            each = room // length  # a row just filled is the fullest with room as long as another piece fits
            full = min(len(found), left // each)
            rows[done : done + full * each] = found[:full].repeat(each)
            done, left = done + full * each, left - full * each
            parts = [(room - each * length, found[:full])]
            if full < len(found) and left:
                rows[done : done + left] = found[full]
                parts.append((room - left * length, found[full : full + 1]))
                done, left, full = done + left, 0, full + 1
            parts.append((room, found[full:]))
            for remaining, these in parts:
                if remaining and len(these):
                    free[remaining].append(these)
                    has_room[remaining] = True
    return rows, opened


@dataclass(frozen=True, eq=False)
class BestFitPlan(Plan):
    """Where each row of best-fit packed documents lies in a flat token array.

    Rows are numbered as they are packed, whole rows of long documents first, and taken in ``order``.

    Attributes:
        offsets: ``[M + 1]`` int64, document m is ``tokens[offsets[m]:offsets[m + 1]]``.
        seq_len: tokens a row.
        documents: ``[N]`` integers, the documents with tokens, in the source's order.
        slots: ``[P]`` integers, the pieces of each row in turn, as places in the order of falling length.
        bounds: ``[R + 1]`` int64, where each of these R rows begins in ``slots``.
        pieces: ``[P]`` integers, the document of each piece in the order of ``slots``.
        long: ``[F]`` integers, the documents that fill at least a whole row.
        long_bounds: ``[F + 1]`` int64, the first of each one's whole rows.
        order: ``[num_rows]`` integers, which packed row each row is; None takes them as packed.
    """

    offsets: NDArray[np.int64]
    seq_len: int
    documents: NDArray[Any]
    slots: NDArray[Any]
    bounds: NDArray[np.int64]
    pieces: NDArray[Any]
    long: NDArray[Any]
    long_bounds: NDArray[np.int64]
    order: NDArray[Any] | None = None

    @classmethod
    def build(cls, offsets: NDArray[np.int64], documents: NDArray[Any], seq_len: int) -> BestFitPlan:
        """Packs the documents; arguments as `RowPlan.build`'s."""
        require_row_length(seq_len)
        lengths = offsets[documents + 1] - offsets[documents]
        documents, lengths = documents[lengths > 0], lengths[lengths > 0]
        rest = lengths % seq_len
        row_of_slot, num_rows = best_fit(np.bincount(rest[rest > 0], minlength=seq_len + 1), seq_len)
        slots = compact_index(np.argsort(row_of_slot, kind="stable"), len(row_of_slot))
        bounds = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of_slot, minlength=num_rows), out=bounds[1:])
        long = documents[lengths >= seq_len]
        long_bounds = np.zeros(len(long) + 1, dtype=np.int64)
        np.cumsum(lengths[lengths >= seq_len] // seq_len, out=long_bounds[1:])
        plan = cls(offsets, seq_len, documents, slots, bounds, documents[:0], long, long_bounds)
        return plan._placed(documents)

    def _placed(self, documents: NDArray[Any]) -> BestFitPlan:
        """The same rows with the documents of each length in the order given."""
        rest = (self.offsets[documents + 1] - self.offsets[documents]) % self.seq_len
        documents, rest = documents[rest > 0], rest[rest > 0]
        by_length = documents[np.argsort(-rest, kind="stable")]
        return replace(self, pieces=by_length[self.slots])

    @property
    def num_rows(self) -> int:
        """Rows that hold the documents."""
        return int(self.long_bounds[-1]) + len(self.bounds) - 1

    def shuffled(self, seed: int, epoch: int, part: int = 0) -> BestFitPlan:
        """Rows of the same lengths with other documents in them, in the order of training."""
        placed = self._placed(self.documents[document_order(len(self.documents), seed, epoch, part)])
        order = row_order(self.num_rows, seed, epoch, part)
        return replace(placed, order=compact_index(order, self.num_rows))

    def packing(self) -> Packing:
        """What the packing does to the documents: those longer than a row are cut."""
        lengths = self.offsets[self.documents + 1] - self.offsets[self.documents]
        row_tokens = self.num_rows * self.seq_len
        cut = int((lengths > self.seq_len).sum())
        return Packing(len(lengths), cut, row_tokens, row_tokens - int(lengths.sum()))

    def take(self, tokens: Any, rows: NDArray[np.int64], pad_id: int) -> Batch:
        inside = np.flatnonzero(rows < self.num_rows)
        cut = rows[inside] if self.order is None else self.order[rows[inside]].astype(np.int64)
        whole = cut < self.long_bounds[-1]
        first = cut[whole]
        index = np.searchsorted(self.long_bounds, first, side="right") - 1
        skipped = (first - self.long_bounds[index]) * self.seq_len
        packed = cut[~whole] - self.long_bounds[-1]
        run, place = spread(self.bounds[packed], self.bounds[packed + 1] - self.bounds[packed])
        documents = np.concatenate([self.long[index], self.pieces[place]])
        head, tail = self.offsets[documents], self.offsets[documents + 1]
        rest = (tail - head)[len(index) :] % self.seq_len
        length = np.concatenate([np.full(len(index), self.seq_len), rest])
        start = head + np.concatenate([skipped, (tail - head)[len(index) :] - rest])
        row = np.concatenate([inside[whole], inside[~whole][run]])
        by_row = np.argsort(row, kind="stable")
        segments = Segments(row, start, length, start == head, start + length == tail)
        return fill_rows(tokens, Segments._make(field[by_row] for field in segments), len(rows), self.seq_len, pad_id)
