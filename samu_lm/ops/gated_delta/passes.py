"""The forward and backward passes of ``chunked`` and ``chunked_fat`` over whole rows.

What does not depend on the state is worked out for a group of chunks at once, the state chunk by chunk. Products within
a chunk grow with the square of its tokens, so a chunk that the caller asks for is worked on in inner ones of at most 32
tokens: N and C count those. The backward pass reads the states between the caller's chunks and works out those in
between, and all else, again; or finds everything kept.

Shapes: as in ``rows.py``; a group has G chunks, ``[G n, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.gated_delta import chunk
from samu_lm.ops.gated_delta.chunk import Gates, Grads, Pairs
from samu_lm.ops.gated_delta.inverse import UnitLowerInverse
from samu_lm.ops.gated_delta.rows import Inputs, Rows

# Products within a chunk of 64 take twice the time of those within its halves, and shorter ones make more calls.
_INNER = 32


def inner_chunk(size: int) -> int:
    """Tokens of a chunk that is worked on as one, where the caller's have ``size``."""
    return min(size, _INNER)


class Kept(NamedTuple):
    """What a backward pass reads besides the inputs; ``chunked`` keeps the states alone, one per caller's chunk."""

    states: Tensor  # [N, n, dk, dv], before each chunk
    d: Tensor  # [N, n, C, C]
    p: Tensor  # [N, n, C, C]
    a: Tensor  # [N, n, C, C]
    inverse: Tensor  # [N, n, C, C]
    u: Tensor  # [N, n, C, dv]


def kept_shapes(inputs: Inputs, size: int, states: bool, fat: bool) -> list[tuple[int, ...]]:
    """Shapes of :class:`Kept`; what is not kept has no elements."""
    batch, length, heads, dk = inputs.q.shape
    inner, dv, n = inner_chunk(size), inputs.v.shape[-1], batch * heads
    count = -(-length // (inner if fat else size))
    rest = [(inner, inner)] * 4 + [(inner, dv)]
    return [
        (count if states else 0, n, dk, dv),
        *((count if fat else 0, n, *shape) for shape in rest),
    ]


class _Solver:
    """Pairs and U of a group, in the tensors that are kept or in some of its own; and what inverts."""

    def __init__(self, rows: Rows, kept: Kept | None) -> None:
        square = (rows.size, rows.size)
        self.rows, self.kept = rows, kept
        self.own = [] if kept is not None else rows.carve(*[square] * 4, (rows.size, rows.dv))
        if kept is None:
            self.own[3].zero_()
        self.inverses: dict[int, UnitLowerInverse] = {}

    def stores(self, group: range) -> tuple[Pairs, Tensor]:
        """Where a group's pairs and U are, or go."""
        if self.kept is None:
            *pairs, u = (x[: len(group) * self.rows.n] for x in self.own)
        else:
            *pairs, u = (x[group.start : group.stop].flatten(0, 1) for x in self.kept[1:])
        return Pairs(*pairs), u

    def relate(self, q: Tensor, k: Tensor, gates: Gates, spare: Tensor, out: Pairs) -> Pairs:
        """:func:`chunk.relate`."""
        if len(q) not in self.inverses:
            self.inverses[len(q)] = UnitLowerInverse(spare)
        return chunk.relate(q, k, gates, self.inverses[len(q)], spare, out)


def _advance(
    rows: Rows,
    group: range,
    gates: Gates,
    operands: tuple[Tensor, Tensor, Tensor],
    written: tuple[Tensor, Tensor],
    states: Sequence[tuple[Tensor, Tensor | None]],
    passing: Tensor | None,
) -> None:
    """The states chunk by chunk, and with them all that the tokens write.

    ``operands`` are beta exp(g) K, exp(g_C - g) K and X; ``written`` R, at first beta V, and U; ``states`` the ones
    before and after each chunk, None where that one is known.
    """
    into, to_end, inverse = operands
    steps = zip(
        group, states, gates.total,
        *(rows.apart(x) for x in (into, to_end.mT, inverse, *written)), strict=True,
    )  # fmt: skip
    for index, (before, after), total, k_into, k_end, inverse_part, r, u in steps:
        if passing is not None:
            before.masked_fill_(~passing[index][:, None, None], 0)
        torch.bmm(inverse_part, r.baddbmm_(k_into, before, alpha=-1), out=u)
        if after is not None:
            torch.mul(before, total, out=after).baddbmm_(k_end, u)


def run_forward(
    inputs: Inputs, size: int, save: bool, fat: bool, passing: Tensor | None = None
) -> tuple[Tensor, Tensor, Kept]:
    """O, the final state, and what is kept.

    ``passing``, bool ``[N + 1, n]``, where given: whether a state goes on past a chunk's edge, or is replaced by zeros.
    """
    inner, fat = inner_chunk(size), fat and save
    multiple = size // inner
    rows = Rows(inputs, inner, multiple)
    key, value, square = (inner, rows.dk), (inner, rows.dv), (inner, inner)
    o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    kept = Kept(*(rows.empty(*shape) for shape in kept_shapes(inputs, size, save, fat)))
    kept.inverse.zero_()
    solver = _Solver(rows, kept if fat else None)
    whole = rows.carve(key, key, key, value, square, (0 if fat else rows.dk, rows.dv))
    state = rows.start()
    tokens = (rows.tokens(x) for x in (*inputs[:3], o))
    for group, gates, *sources, out in zip(rows.groups(), rows.gates(), *tokens, strict=True):
        q, k, into, r, spare, own_states = (x[: len(group) * rows.n] for x in whole)
        states = kept.states[group.start : group.stop].flatten(0, 1) if fat else own_states
        for source, store in zip(sources, (q, k, r), strict=True):
            rows.cut(source, store)
        stores, u = solver.stores(group)
        pairs = solver.relate(q, k, gates, spare, stores)
        r.mul_(gates.beta)
        torch.mul(k, gates.through, out=into)
        q.mul_(gates.from_start)
        k.mul_(gates.to_end)
        before = rows.apart(states)
        before[0].copy_(state)
        edges = list(zip(before, (*before[1:], state), strict=True))
        _advance(rows, group, gates, (into, k, pairs.inverse), (r, u), edges, passing)
        if save and not fat:
            kept_part = kept.states[group.start // multiple : -(-group.stop // multiple)]
            kept_part.copy_(states.unflatten(0, (-1, rows.n))[::multiple])
        rows.paste(torch.bmm(q, states, out=r).baddbmm_(pairs.p, u), out)
    return o, state.view(rows.batch, rows.heads, rows.dk, rows.dv), kept


def _adjoint(
    rows: Rows,
    group: range,
    gates: Gates,
    operands: tuple[Tensor, Tensor, Tensor],
    grads: Grads,
    edges: Tensor,
    passing: Tensor | None,
) -> None:
    """The states' gradients chunk by chunk, backwards, and with them all of U's and R's.

    ``operands`` are beta exp(g) K, exp(g_C - g) K and X. ``edges[i + 1]`` is the gradient of the state after chunk i,
    ``edges[i]`` at first what chunk i's own outputs ask.
    """
    into, to_end, inverse = operands
    at = edges[: len(group) + 1].unbind()
    steps = zip(
        group, at[1:], at[:-1], gates.total,
        *(rows.apart(x) for x in (into.mT, to_end, inverse.mT, grads.u, grads.minus_r)), strict=True,
    )  # fmt: skip
    for index, after, before, total, k_into, k_end, inverse_t, of_u, minus_r in reversed(list(steps)):
        if passing is not None:
            after.masked_fill_(~passing[index + 1][:, None, None], 0)
        of_u.baddbmm_(k_end, after)
        minus_r.baddbmm_(inverse_t, of_u, beta=0, alpha=-1)
        before.addcmul_(after, total).baddbmm_(k_into, minus_r)


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
    inner = inner_chunk(size)
    multiple = size // inner
    rows = Rows(inputs, inner, multiple)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]
    grad_g, grad_beta = torch.empty_like(rows.g), torch.empty_like(rows.beta)
    through_total = torch.empty_like(rows.total)
    solver, key, value, square = (
        _Solver(rows, kept if fat else None),
        (inner, rows.dk),
        (inner, rows.dv),
        (inner, inner),
    )
    own_states = (0 if fat else rows.dk, rows.dv)
    whole = rows.carve(key, key, value, value, key, key, value, value, key, key, *[square] * 4, own_states)
    # Gradients of the states before a group's chunks, and of the one after it.
    edges = rows.empty(min(rows.together, rows.count) + 1, rows.n, rows.dk, rows.dv)
    edges[0] = grad_final_state.reshape(edges[0].shape)
    tokens = zip(*(rows.tokens(x) for x in (*inputs[:3], grad_o, *grads)), strict=True)
    work = list(zip(rows.groups(), rows.gates(), tokens, strict=True))
    for group, gates, (*sources, to_q, to_k, to_v) in reversed(work):
        part, many = slice(group.start, group.stop), len(group) * rows.n
        q, k, v, o, into, to_end, of_u, minus_r, of_q, of_k, of_qk, of_kk, *spare, states = (x[:many] for x in whole)
        for source, store in zip(sources, (q, k, v, o), strict=True):
            rows.cut(source, store)
        torch.mul(k, gates.through, out=into)
        torch.mul(k, gates.to_end, out=to_end)
        pairs, u = solver.stores(group)
        if fat:
            states = kept.states[part].flatten(0, 1)
        else:
            solver.relate(q, k, gates, spare[0], pairs)
            known = kept.states[group.start // multiple : -(-group.stop // multiple)]
            states.unflatten(0, (-1, rows.n))[::multiple].copy_(known)
            before = rows.apart(states)
            after = [x if i % multiple else None for i, x in enumerate(before)][1:]
            r = torch.mul(v, gates.beta, out=minus_r)  # its gradient comes later
            ends = list(zip(before, [*after, None], strict=True))
            _advance(rows, group, gates, (into, to_end, pairs.inverse), (r, u), ends, passing)
        edges[len(group)] = edges[0]
        of_group = Grads(o, of_u, minus_r, of_q, of_k, of_qk, of_kk)
        chunk.local_gradients(q, gates, pairs, u, of_group, edges[: len(group)].flatten(0, 1))
        _adjoint(rows, group, gates, (into, to_end, pairs.inverse), of_group, edges, passing)
        both = states, edges[1 : len(group) + 1].flatten(0, 1)
        of_gates = chunk.backward((q, k, v), gates, pairs, u, both, of_group, (spare[0], spare[1], into))
        for whole_row, of_gate in zip((grad_g, grad_beta, through_total), of_gates, strict=True):
            whole_row[part] = of_gate.view_as(whole_row[part])
        for of_input, target in ((of_q, to_q), (of_k, to_k), (minus_r, to_v)):
            rows.paste(of_input, target)
    grad_g[..., -1] += rows.total * through_total
    return (
        *grads,
        rows.unscalars(rows.grad_log_alpha(grad_g), inputs.log_alpha),
        rows.unscalars(grad_beta, inputs.beta),
        edges[0].reshape(rows.batch, rows.heads, rows.dk, rows.dv).clone(),
    )
