"""Prefix over chunks: from every chunk's own state to the state that each chunk starts from.

Shapes: states ``[B * N, 2M]`` float32 (N chunks per row; real, then imaginary parts), chunk records ``[3, B * N]``
(see ``kernel_controls``). With REVERSE the same runs over adjoints: chunks from last to first, conjugate transitions.

Two levels: ``group_states_kernel`` sums up G chunks at a time, ``carries_kernel`` starts each group from the groups
before it and walks its chunks. With one group the first is not needed.
"""

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.samu.kernel_spectrum import COS_CHUNK, COS_GROUP, NU2, SIN_CHUNK, SIN_GROUP


@triton.jit
def _advance(h_re, h_im, nu2, cos, sin, total, turn_cos, turn_sin, s_re, s_im):
    """State after a span: its product of transitions times the state before it, plus its own state.

    ``total`` -1 marks a first token inside the span: the state before it is selected away, whatever it is.
    """
    r = tl.exp2(nu2 * total)
    a_re = r * (cos * turn_cos - sin * turn_sin)
    a_im = r * (sin * turn_cos + cos * turn_sin)
    forget = total < 0
    return (
        tl.where(forget, 0.0, a_re * h_re - a_im * h_im) + s_re,
        tl.where(forget, 0.0, a_re * h_im + a_im * h_re) + s_im,
    )


@triton.jit
def _load_span(states, records, planes, at, modes, mask, valid, M, REVERSE: tl.constexpr):
    """A chunk's (or group's) record and own state; with REVERSE its rotation is conjugate."""
    total = tl.load(records + at, mask=valid, other=0.0)
    turn_cos = tl.load(records + planes + at, mask=valid, other=1.0)
    turn_sin = tl.load(records + 2 * planes + at, mask=valid, other=0.0)
    if REVERSE:
        turn_sin = -turn_sin
    own = states + at.to(tl.int64) * (2 * M) + modes
    s_re = tl.load(own, mask=mask & valid, other=0.0)
    s_im = tl.load(own + M, mask=mask & valid, other=0.0)
    return total, turn_cos, turn_sin, s_re, s_im


@triton.jit
def _chunk_index(b, c, row_chunks, REVERSE: tl.constexpr):
    if REVERSE:
        c = row_chunks - 1 - c
    return b * row_chunks + c


@triton.jit(do_not_specialize=["row_chunks", "chunks", "row_groups"])
def group_states_kernel(
    states,
    chunk_records,
    table,
    group_states,
    group_records,
    row_chunks,
    chunks,
    row_groups,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """State and record of each group of GROUP chunks, from zero; the last group of a row is not needed."""
    pid = tl.program_id(0)
    group = pid // MODE_BLOCKS
    b = group // row_groups
    g = group % row_groups
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    nu2 = tl.load(table + NU2 * M + modes, mask=mask, other=0.0)
    cos = tl.load(table + COS_CHUNK * M + modes, mask=mask, other=0.0)
    sin = tl.load(table + SIN_CHUNK * M + modes, mask=mask, other=0.0)
    if REVERSE:
        sin = -sin
    h_re = tl.zeros([BLOCK], tl.float32)
    h_im = tl.zeros([BLOCK], tl.float32)
    sum_total = 0.0
    broken = 0.0
    turn_re = 1.0
    turn_im = 0.0
    for start in range(0, GROUP, AHEAD):
        spans = ()
        for j in tl.static_range(AHEAD):
            c = g * GROUP + start + j
            at = _chunk_index(b, c, row_chunks, REVERSE)
            spans = spans + (_load_span(states, chunk_records, chunks, at, modes, mask, c < row_chunks, M, REVERSE),)
        for j in tl.static_range(AHEAD):
            total, turn_cos, turn_sin, s_re, s_im = spans[j]
            h_re, h_im = _advance(h_re, h_im, nu2, cos, sin, total, turn_cos, turn_sin, s_re, s_im)
            broken = tl.maximum(broken, tl.where(total < 0, 1.0, 0.0))
            sum_total += total
            turned = turn_re * turn_cos - turn_im * turn_sin
            turn_im = turn_re * turn_sin + turn_im * turn_cos
            turn_re = turned
    out = group_states + group.to(tl.int64) * (2 * M) + modes
    tl.store(out, h_re, mask=mask)
    tl.store(out + M, h_im, mask=mask)
    groups = tl.num_programs(0) // MODE_BLOCKS
    if pid % MODE_BLOCKS == 0:
        tl.store(group_records + group, tl.where(broken > 0, -1.0, sum_total))
        tl.store(group_records + groups + group, turn_re)
        if REVERSE:  # records hold the rotation itself; whoever loads it conjugates it
            turn_im = -turn_im
        tl.store(group_records + 2 * groups + group, turn_im)


@triton.jit(do_not_specialize=["row_chunks", "chunks", "row_groups"])
def carries_kernel(
    states,
    chunk_records,
    table,
    group_states,
    group_records,
    row_chunks,
    chunks,
    row_groups,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replaces each chunk's own state by the state that the chunk starts from."""
    pid = tl.program_id(0)
    group = pid // MODE_BLOCKS
    b = group // row_groups
    g = group % row_groups
    groups = tl.num_programs(0) // MODE_BLOCKS
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    nu2 = tl.load(table + NU2 * M + modes, mask=mask, other=0.0)
    h_re = tl.zeros([BLOCK], tl.float32)
    h_im = tl.zeros([BLOCK], tl.float32)
    if row_groups > 1:
        cos = tl.load(table + COS_GROUP * M + modes, mask=mask, other=0.0)
        sin = tl.load(table + SIN_GROUP * M + modes, mask=mask, other=0.0)
        if REVERSE:
            sin = -sin
        for start in range(0, g, AHEAD):
            spans = ()
            for j in tl.static_range(AHEAD):
                before = start + j < g
                at = b * row_groups + start + j
                spans = spans + (_load_span(group_states, group_records, groups, at, modes, mask, before, M, REVERSE),)
            for j in tl.static_range(AHEAD):
                before = start + j < g
                total, turn_cos, turn_sin, s_re, s_im = spans[j]
                next_re, next_im = _advance(h_re, h_im, nu2, cos, sin, total, turn_cos, turn_sin, s_re, s_im)
                h_re = tl.where(before, next_re, h_re)
                h_im = tl.where(before, next_im, h_im)
    cos = tl.load(table + COS_CHUNK * M + modes, mask=mask, other=0.0)
    sin = tl.load(table + SIN_CHUNK * M + modes, mask=mask, other=0.0)
    if REVERSE:
        sin = -sin
    for start in range(0, GROUP, AHEAD):
        spans = ()
        for j in tl.static_range(AHEAD):
            c = g * GROUP + start + j
            at = _chunk_index(b, c, row_chunks, REVERSE)
            spans = spans + (_load_span(states, chunk_records, chunks, at, modes, mask, c < row_chunks, M, REVERSE),)
        for j in tl.static_range(AHEAD):
            c = g * GROUP + start + j
            at = _chunk_index(b, c, row_chunks, REVERSE)
            total, turn_cos, turn_sin, s_re, s_im = spans[j]
            own = states + at.to(tl.int64) * (2 * M) + modes
            tl.store(own, h_re, mask=mask & (c < row_chunks))
            tl.store(own + M, h_im, mask=mask & (c < row_chunks))
            h_re, h_im = _advance(h_re, h_im, nu2, cos, sin, total, turn_cos, turn_sin, s_re, s_im)
