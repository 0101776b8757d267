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
from samu_lm.ops.gated_delta.chunk import Decay, Pairs, Solved
from samu_lm.ops.gated_delta.reference import drops, work_dtype

SMALLEST_CHUNK = 16
# Entries of the C x C matrices that are worked out in one go: 512 KiB of float32, so that they stay in cache.
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

    def groups(self) -> list[range]:
        """Chunks that are related together: as few calls as the cache allows; an unfilled last chunk stays alone."""
        together = max(1, _ELEMENTS_TOGETHER // (self.n * self.size * self.size))
        full = self.length // self.size
        groups = [range(start, min(start + together, full)) for start in range(0, full, together)]
        return groups if full == self.count else [*groups, range(full, self.count)]

    def cut(self, x: Tensor, group: range, out: Tensor) -> Tensor:
        """Copies chunks of ``[B, T, H, d]`` to ``[G, n, C, d]``."""
        part = x[:, group.start * self.size : group.stop * self.size]
        length = min(part.shape[1], self.size)
        shaped = out.unflatten(1, (self.batch, self.heads))[:, :, :, :length]
        shaped.copy_(part.unflatten(1, (len(group), length)).permute(1, 0, 3, 2, 4))
        if length < self.size:
            out[:, :, length:] = 0
        return out

    def paste(self, x: Tensor, group: range, out: Tensor) -> None:
        """Copies ``[G n, C, d]`` to the group's chunks of ``[B, T, H, d]``."""
        part = out[:, group.start * self.size : group.stop * self.size]
        length = min(part.shape[1], self.size)
        shaped = x.view(len(group), self.batch, self.heads, self.size, -1)[:, :, :, :length]
        part.unflatten(1, (len(group), length)).copy_(shaped.permute(1, 0, 3, 2, 4))

    def empty(self, *sizes: int) -> Tensor:
        """A work tensor."""
        return self.inputs.q.new_empty(sizes, dtype=self.work)

    def qk(self, group: range) -> Tensor:
        """Queries above keys, ``[G n, 2C, dk]``."""
        both = self.empty(len(group), self.n, 2 * self.size, self.dk)
        self.cut(self.inputs.q, group, both[:, :, : self.size])
        self.cut(self.inputs.k, group, both[:, :, self.size :])
        return both.flatten(0, 1)

    def values(self, x: Tensor, group: range) -> Tensor:
        """Values or their outputs' gradients, ``[G n, C, dv]``."""
        return self.cut(x, group, self.empty(len(group), self.n, self.size, self.dv)).flatten(0, 1)

    def gates(self, group: range) -> tuple[Tensor, Decay]:
        """beta and the decays of a group's chunks, ``[G n, ...]``."""
        part = slice(group.start, group.stop)
        document = self.document[part].flatten(0, 1) if any(self.divided[part]) else None
        g, beta, start, end, total = (
            x[part].flatten(0, 1) for x in (self.g, self.beta, self.from_start, self.to_end, self.total)
        )
        return beta, Decay(g, document, start, end, total)

    def apart(self, x: Tensor) -> Tensor:
        """``[G n, ...]`` to ``[G, n, ...]``."""
        return x.unflatten(0, (-1, self.n))

    def start(self) -> Tensor:
        """The state before the first chunk, ``[n, dk, dv]``."""
        state = self.inputs.initial_state
        if state is None:
            return self.empty(self.n, self.dk, self.dv).zero_()
        return state.to(self.work).reshape(self.n, self.dk, self.dv)


class Kept(NamedTuple):
    """What a backward pass reads besides the inputs, per chunk; ``chunked`` keeps the states alone."""

    states: Tensor  # [N, n, dk, dv], before each chunk
    d: Tensor  # [N, n, C, C]
    pa: Tensor  # [N, n, 2C, C]
    inverse: Tensor  # [N, n, C, C]
    u: Tensor  # [N, n, C, dv]
    w: Tensor  # [N, n, C, dk]


def kept_shapes(inputs: Inputs, size: int, states: bool, fat: bool) -> list[tuple[int, ...]]:
    """Shapes of :class:`Kept`; what is not kept has no elements."""
    batch, length, heads, dk = inputs.q.shape
    dv, count, n = inputs.v.shape[-1], (length + size - 1) // size, batch * heads
    rest = [(size, size), (2 * size, size), (size, size), (size, dv), (size, dk)]
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
    for group in rows.groups():
        part = slice(group.start, group.stop)
        beta, decay = rows.gates(group)
        qk = rows.qk(group)
        pairs = chunk.relate(qk, beta, decay)
        solved = chunk.solve(qk, rows.values(inputs.v, group), beta, decay, pairs.inverse)
        seen, total = rows.apart(qk[:, size:] * decay.to_end[..., None]), rows.total[part, :, None, None]
        u0, w = (rows.apart(x) for x in solved)
        u = kept.u[part] if fat else rows.empty(len(group), rows.n, size, rows.dv)
        states = kept.states[part] if save else rows.empty(len(group), rows.n, rows.dk, rows.dv)
        for i, index in enumerate(group):
            states[i] = _carry(state, passing, index)
            torch.baddbmm(u0[i], w[i], states[i], alpha=-1, out=u[i])
            state = torch.baddbmm(states[i] * total[i], seen[i].mT, u[i])
        rows.paste(chunk.output(qk, decay, pairs, u.flatten(0, 1), states.flatten(0, 1)), group, o)
        if fat:
            for store, value in zip((kept.d, kept.pa, kept.inverse, kept.w), (*pairs, solved.w), strict=True):
                store[part] = rows.apart(value)
    return o, state.reshape(rows.batch, rows.heads, rows.dk, rows.dv).clone(), kept


def _written(
    rows: Rows, group: range, kept: Kept, fat: bool, qk: Tensor, v: Tensor, beta: Tensor, decay: Decay
) -> tuple[Pairs, Tensor, Tensor]:
    """A group's pairs, U and W: found kept, or worked out again from the states."""
    part = slice(group.start, group.stop)
    if fat:
        d, pa, inverse, u, w = (x[part].flatten(0, 1) for x in kept[1:])
        return Pairs(d, pa, inverse), u, w
    pairs = chunk.relate(qk, beta, decay)
    solved: Solved = chunk.solve(qk, v, beta, decay, pairs.inverse)
    return pairs, torch.baddbmm(solved.u0, solved.w, kept.states[part].flatten(0, 1), alpha=-1), solved.w


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
    q, k, v, log_alpha, beta_input = inputs[:5]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    grad_g, grad_beta = torch.empty_like(rows.g), torch.empty_like(rows.beta)
    grad_state = grad_final_state.to(rows.work).reshape(rows.n, rows.dk, rows.dv)
    for group in reversed(rows.groups()):
        part = slice(group.start, group.stop)
        beta, decay = rows.gates(group)
        qk, values, out = rows.qk(group), rows.values(v, group), rows.values(grad_o, group)
        pairs, u, w = _written(rows, group, kept, fat, qk, values, beta, decay)
        grad_u, by_output = (rows.apart(x) for x in chunk.local_gradients(qk, decay, pairs, out))
        seen, total = rows.apart(qk[:, size:] * decay.to_end[..., None]), rows.total[part, :, None, None]
        turned, after = rows.apart(w).mT, rows.empty(len(group), rows.n, rows.dk, rows.dv)
        for i, index in reversed(list(enumerate(group))):
            after[i] = _carry(grad_state, passing, index + 1)
            grad_u[i].baddbmm_(seen[i], after[i])
            grad_state = torch.addcmul(by_output[i], after[i], total[i]).baddbmm_(turned[i], grad_u[i], alpha=-1)
        state = kept.states[part].flatten(0, 1)
        ends = out, grad_u.flatten(0, 1), after.flatten(0, 1)
        grad = chunk.backward(qk, values, beta, decay, pairs, u, state, *ends)
        for value, target in zip((grad.q, grad.k, grad.v), grads, strict=True):
            rows.paste(value, group, target)
        grad_g[part], grad_beta[part] = rows.apart(grad.g), rows.apart(grad.beta)
    return (
        *grads,
        rows.unscalars(rows.grad_log_alpha(grad_g), log_alpha),
        rows.unscalars(grad_beta, beta_input),
        grad_state.reshape(rows.batch, rows.heads, rows.dk, rows.dv).clone(),
    )
