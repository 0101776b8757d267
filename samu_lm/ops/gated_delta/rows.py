"""The gated delta rule over whole rows, chunk by chunk, forward and backward.

A backward pass reads the state before every chunk; what else it needs it works out again, or finds kept. One chunk of
all rows and heads is worked on at a time, so that its temporaries stay in the processor's cache.

Shapes: as in ``reference.py``; N chunks of C tokens, the last one filled up with tokens that do nothing; n = B H.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.gated_delta import chunk
from samu_lm.ops.gated_delta.chunk import Decay, Pairs, Written
from samu_lm.ops.gated_delta.reference import drops, work_dtype

SMALLEST_CHUNK = 16
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
    """Rows cut into chunks: small per-token tensors prepared at once, the large ones cut one chunk at a time."""

    def __init__(self, inputs: Inputs, size: int) -> None:
        q, v = inputs.q, inputs.v
        self.inputs, self.size, self.work = inputs, size, work_dtype(q)
        self.batch, self.length, self.heads, self.dk = q.shape
        self.dv, self.n = v.shape[-1], q.shape[0] * q.shape[2]
        self.count = -(-self.length // size)
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

    def cut(self, x: Tensor, index: int, out: Tensor) -> Tensor:
        """Copies chunk ``index`` of ``[B, T, H, d]`` to ``[n, C, d]``."""
        part = x[:, index * self.size : (index + 1) * self.size]
        length = part.shape[1]
        out = out.unflatten(0, (self.batch, self.heads))
        out[:, :, :length] = part.transpose(1, 2)
        if length < self.size:
            out[:, :, length:] = 0
        return out.flatten(0, 1)

    def paste(self, x: Tensor, index: int, out: Tensor) -> None:
        """Copies ``[n, C, d]`` to chunk ``index`` of ``[B, T, H, d]``."""
        part = out[:, index * self.size : (index + 1) * self.size]
        part.transpose(1, 2).copy_(x.unflatten(0, (self.batch, self.heads))[:, :, : part.shape[1]])

    def empty(self, *sizes: int) -> Tensor:
        """A work tensor ``[n, *sizes]``."""
        return self.inputs.q.new_empty(self.n, *sizes, dtype=self.work)

    def qk(self, index: int) -> Tensor:
        """A chunk's queries above its keys, ``[n, 2C, dk]``."""
        both = self.empty(2 * self.size, self.dk)
        self.cut(self.inputs.q, index, both[:, : self.size])
        self.cut(self.inputs.k, index, both[:, self.size :])
        return both

    def values(self, x: Tensor, index: int) -> Tensor:
        """A chunk of values or of their outputs' gradients, ``[n, C, dv]``."""
        return self.cut(x, index, self.empty(self.size, self.dv))

    def decay(self, index: int) -> Decay:
        """A chunk's decays."""
        document = self.document[index] if self.divided[index] else None
        return Decay(self.g[index], document, self.from_start[index], self.to_end[index], self.total[index])

    def relate(self, index: int, qk: Tensor) -> Pairs:
        """What relates a chunk's tokens."""
        return chunk.relate(qk, self.beta[index], self.decay(index))

    def start(self) -> Tensor:
        """The state before the first chunk, ``[n, dk, dv]``."""
        state = self.inputs.initial_state
        if state is None:
            return self.empty(self.dk, self.dv).zero_()
        return state.to(self.work).reshape(self.n, self.dk, self.dv)


class Kept(NamedTuple):
    """What a backward pass reads besides the inputs, per chunk; ``chunked`` keeps the states alone."""

    states: Tensor  # [N, n, dk, dv], before each chunk
    d: Tensor  # [N, n, C, C]
    pa: Tensor  # [N, n, 2C, C]
    inverse: Tensor  # [N, n, C, C]
    residual: Tensor  # [N, n, C, dv]
    u: Tensor  # [N, n, C, dv]


def kept_shapes(inputs: Inputs, size: int, states: bool, fat: bool) -> list[tuple[int, ...]]:
    """Shapes of :class:`Kept`; what is not kept has no elements."""
    batch, length, heads, dk = inputs.q.shape
    dv, count, n = inputs.v.shape[-1], (length + size - 1) // size, batch * heads
    rest = [(size, size), (2 * size, size), (size, size), (size, dv), (size, dv)]
    return [
        (count if states else 0, n, dk, dv),
        *((count if fat else 0, n, *shape) for shape in rest),
    ]


def _carry(state: Tensor, passing: Tensor | None, index: int) -> Tensor:
    return state if passing is None else torch.where(passing[index][:, None, None], state, 0)


def run_forward(
    inputs: Inputs, size: int, save: bool, fat: bool, passing: Tensor | None = None
) -> tuple[Tensor, Tensor, Kept]:
    """O, the final state, and what is kept.

    ``passing``, bool ``[N + 1, n]``, where given: whether a state goes on past a chunk's edge, or is replaced by zeros.
    """
    rows, fat = Rows(inputs, size), fat and save
    o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    kept = Kept(*(inputs.q.new_empty(shape, dtype=rows.work) for shape in kept_shapes(inputs, size, save, fat)))
    state = rows.start()
    for index in range(rows.count):
        state = _carry(state, passing, index)
        qk, v = rows.qk(index), rows.values(inputs.v, index)
        pairs = rows.relate(index, qk)
        if save:
            kept.states[index] = state
        out, written, state = chunk.forward(qk, v, rows.beta[index], rows.decay(index), pairs, state)
        rows.paste(out, index, o)
        if fat:
            for store, value in zip(kept[1:], (*pairs, *written), strict=True):
                store[index] = value
    return o, state.reshape(rows.batch, rows.heads, rows.dk, rows.dv).clone(), kept


def run_backward(
    inputs: Inputs,
    size: int,
    kept: Kept,
    fat: bool,
    grad_o: Tensor,
    grad_final_state: Tensor,
    passing: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of the five inputs and of the initial state; ``passing`` as in :func:`run_forward`."""
    rows = Rows(inputs, size)
    q, k, v, log_alpha, beta = inputs[:5]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    grad_g, grad_beta = torch.empty_like(rows.g), torch.empty_like(rows.beta)
    grad_state = grad_final_state.to(rows.work).reshape(rows.n, rows.dk, rows.dv)
    for index in reversed(range(rows.count)):
        qk, state, decay = rows.qk(index), kept.states[index], rows.decay(index)
        grad_state = _carry(grad_state, passing, index + 1)
        if fat:
            pairs = Pairs(kept.d[index], kept.pa[index], kept.inverse[index])
            written = Written(kept.residual[index], kept.u[index])
        else:
            pairs = rows.relate(index, qk)
            k_state = torch.bmm(qk[:, size:], state)
            written = chunk.write(k_state, rows.values(v, index), rows.beta[index], decay, pairs.inverse)
        grad = chunk.backward(
            qk, rows.beta[index], decay, pairs, written, state, rows.values(grad_o, index), grad_state
        )
        for value, out in zip((grad.q, grad.k, grad.v), grads, strict=True):
            rows.paste(value, index, out)
        grad_g[index], grad_beta[index], grad_state = grad.g, grad.beta, grad.state
    return (
        *grads,
        rows.unscalars(rows.grad_log_alpha(grad_g), log_alpha),
        rows.unscalars(grad_beta, beta),
        grad_state.reshape(rows.batch, rows.heads, rows.dk, rows.dv).clone(),
    )
