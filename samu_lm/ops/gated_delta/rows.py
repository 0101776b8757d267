"""Rows of the gated delta rule cut into groups of chunks, and their decays.

A few chunks of all rows and heads are worked on at a time, so that temporaries stay in the processor's cache.

Shapes: as in ``reference.py``; N chunks of C tokens, the last one filled up with tokens that do nothing; n = B H.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.gated_delta.chunk import Decay, Gates
from samu_lm.ops.gated_delta.reference import drops, work_dtype

SMALLEST_CHUNK = 16
# Entries of the largest tensor of tokens that are worked on in one go: 512 KiB of float32, so that they stay in cache.
_ELEMENTS_TOGETHER = 2**17
# exp of it is 0 in float64 too; sums of anything lower would swallow the decays of later tokens.
_LOWEST_LOG_ALPHA = -1000.0


class Inputs(NamedTuple):
    """The tensors of a call; ``first`` and ``initial_state`` may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor
    first: Tensor | None
    initial_state: Tensor | None


def fitted_chunk(length: int, chunk_size: int) -> int:
    """The chunk size for a row: ``chunk_size``, or the least power of two that holds a shorter row."""
    size = SMALLEST_CHUNK
    while size < min(length, chunk_size):
        size *= 2
    return size


def _segmented_sum(x: Tensor, starts: Tensor) -> Tensor:
    """Running sums along the last axis that begin anew where ``starts``; sums of one segment see no other's values."""
    closed, step = starts.clone(), 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], torch.where(closed[..., step:], 0, x[..., :-step]) + x[..., step:]], -1)
        closed = torch.cat([closed[..., :step], closed[..., step:] | closed[..., :-step]], -1)
        step *= 2
    return x


class Rows:
    """Rows cut into chunks: small per-token tensors prepared at once, the large ones cut one group at a time."""

    def __init__(self, inputs: Inputs, size: int, multiple: int = 1) -> None:
        """Groups of chunks of ``size`` tokens start at a multiple of ``multiple`` chunks."""
        q, v = inputs.q, inputs.v
        self.inputs, self.size, self.work = inputs, size, work_dtype(q)
        self.batch, self.length, self.heads, self.dk = q.shape
        self.dv, self.n = v.shape[-1], q.shape[0] * q.shape[2]
        self.count = -(-self.length // size)
        elements = self.n * size * max(self.dk, self.dv, size)  # of one chunk
        self.together = max(1, _ELEMENTS_TOGETHER // (elements * multiple)) * multiple
        starts = self.scalars(drops(inputs.log_alpha, inputs.first), torch.bool)
        log_alpha = self.scalars(inputs.log_alpha, torch.float64).clamp(min=_LOWEST_LOG_ALPHA)
        g = _segmented_sum(log_alpha.masked_fill(starts, 0), starts)
        document = starts.cumsum(-1)
        last = document[..., -1:]
        self.starts, self.beta = starts, self.scalars(inputs.beta, self.work)
        self.g, self.document = g, document
        self.from_start = g.exp().masked_fill_(document != 0, 0).to(self.work)
        self.to_end = (g[..., -1:] - g).exp().masked_fill_(document != last, 0).to(self.work)
        self.total = g[..., -1].exp().masked_fill_(last[..., 0] != 0, 0).to(self.work)

    @cached_property
    def divided(self) -> list[bool]:
        """Whether a document begins inside each chunk."""
        return self.starts[..., 1:].flatten(1).any(1).tolist()

    def scalars(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, H]`` to ``[N, n, C]``; tokens past the end are 0."""
        x = torch.nn.functional.pad(x, (0, 0, 0, self.count * self.size - self.length))
        x = x.view(self.batch, self.count, self.size, self.heads).permute(1, 0, 3, 2).to(dtype)
        return x.reshape(self.count, self.n, self.size).contiguous()

    def unscalars(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`scalars`, in the dtype of ``like``."""
        x = x.view(self.count, self.batch, self.heads, self.size).permute(1, 0, 3, 2)
        return x.reshape(self.batch, -1, self.heads)[:, : self.length].to(like.dtype)

    def grad_log_alpha(self, grad_g: Tensor) -> Tensor:
        """``[N, n, C]`` from g's gradient: log_alpha_s moves every g_t of its document and chunk with t >= s."""
        ends = torch.nn.functional.pad(self.starts[..., 1:], (0, 1)).flip(-1)
        return (
            _segmented_sum(grad_g.flip(-1), ends).flip(-1).masked_fill_(self.starts, 0)
        )  # a first token's is not read

    def groups(self) -> list[range]:
        """Chunks that are worked on together: as few calls as the cache allows."""
        starts = range(0, self.count, self.together)
        return [range(start, min(start + self.together, self.count)) for start in starts]

    def carve(self, *shapes: tuple[int, int]) -> list[Tensor]:
        """Work tensors ``[G n, *shape]`` for the largest group, side by side in one allocation.

        Freed in one piece, it is had again from the system's allocator without new pages.
        """
        leading = min(self.together, self.count) * self.n
        sizes = [leading * rows * columns for rows, columns in shapes]
        parts = self.empty(sum(sizes)).split(sizes)
        return [part.view(leading, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def tokens(self, x: Tensor) -> list[list[Tensor]]:
        """Each group's tokens of ``[B, T, H, d]``: a view ``[G, B, H, C, d]``, and one of an unfilled chunk's."""
        full = self.length // self.size
        result = []
        for group in self.groups():
            filled = range(group.start, min(group.stop, full))
            part = x[:, filled.start * self.size : filled.stop * self.size]
            views = [part.unflatten(1, (len(filled), self.size)).permute(1, 0, 3, 2, 4)] if filled else []
            result.append([*views, x[:, full * self.size :].transpose(1, 2)[None]] if group.stop > full else views)
        return result

    def cut(self, tokens: list[Tensor], out: Tensor) -> Tensor:
        """Copies :meth:`tokens` to ``[G n, C, d]``; zeros where a chunk is not filled."""
        chunks = out.view(-1, self.batch, self.heads, self.size, out.shape[-1])
        for part, view in self._parts(chunks, tokens):
            part.copy_(view)
        if (length := tokens[-1].shape[3]) < self.size:
            chunks[-1, :, :, length:] = 0
        return out

    def paste(self, x: Tensor, tokens: list[Tensor]) -> None:
        """Copies ``[G n, C, d]`` to :meth:`tokens`."""
        for part, view in self._parts(x.view(-1, self.batch, self.heads, self.size, x.shape[-1]), tokens):
            view.copy_(part)

    def _parts(self, chunks: Tensor, tokens: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for view in tokens:
            yield chunks[start : start + len(view), :, :, : view.shape[3]], view
            start += len(view)

    def empty(self, *sizes: int) -> Tensor:
        """A work tensor."""
        return self.inputs.q.new_empty(sizes, dtype=self.work)

    def gates(self) -> list[Gates]:
        """What each group's tokens are multiplied by."""
        groups = self.groups()
        sizes = [len(group) * self.n for group in groups]
        scales = (self.beta, self.from_start, self.to_end, self.beta * self.from_start)
        beta, start, end, through = (x.view(-1, self.size, 1).split(sizes) for x in scales)
        g, documents = (x.view(-1, self.size).split(sizes) for x in (self.g, self.document))
        totals = self.total.view(self.count, self.n, 1, 1).unbind()
        result = []
        for i, group in enumerate(groups):
            part = slice(group.start, group.stop)
            decay = Decay(g[i], documents[i] if any(self.divided[part]) else None)
            result.append(Gates(beta[i], start[i], end[i], through[i], totals[part], decay))
        return result

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[G n, ...]`` to G tensors ``[n, ...]``."""
        return x.unflatten(0, (-1, self.n)).unbind()

    def start(self) -> Tensor:
        """A copy of the state before the first chunk, ``[n, dk, dv]``."""
        state = self.inputs.initial_state
        out = self.empty(self.n, self.dk, self.dv)
        return out.zero_() if state is None else out.copy_(state.reshape(out.shape))
