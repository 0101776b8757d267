"""SAMU kernel that makes the controls and, while x is still in the cache, each chunk's own state.

Shapes as in ``kernel_controls`` and ``kernel_scan``. A program owns the whole rows of one chunk and goes through it in
pieces: logits of a piece (a tile at a time), its token records (a token per thread), then its tokens in order with
every mode in registers. The second reading of x comes from the cache.
"""

import triton
import triton.language as tl

from samu_lm.ops.samu.kernel_controls import chunk_record, row_logits, tile_logits, token_records
from samu_lm.ops.samu.kernel_rows import (
    kept_state,
    lanes_of,
    load_modes,
    load_record,
    load_rows,
    prefetch_rows,
    store_pair,
    transition,
    turn,
    widen,
)
from samu_lm.ops.samu.kernel_spectrum import COS, GAMMA, MODE_ROWS, NU2, SIN, UNIT_PAD

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# mypy: ignore-errors


@triton.jit
def _walk(
    rows,
    records,
    plane,
    nu2,
    cos,
    sin,
    h_re,
    h_im,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    FIRSTS: tl.constexpr,
):
    """The state STEP tokens on; without FIRSTS no token is a first one."""
    for j in tl.static_range(STEP):
        stretch, turn_cos, turn_sin, forget = load_record(records + j, plane)
        a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
        x_re, x_im = rows[j]
        if FIRSTS:
            h_re, h_im = kept_state(h_re, h_im, forget)
        h_re, h_im = turn(a_re, a_im, h_re, h_im, widen(x_re, BLOCK, PACKED), widen(x_im, BLOCK, PACKED))
    return h_re, h_im


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def controls_and_states_kernel(
    x,
    first,
    table,
    initial_state,
    records,
    chunk_records,
    states,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    TILES: tl.constexpr,
    SECTORS: tl.constexpr,
    BRANCH: tl.constexpr,
    STEP: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_THREAD: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Token records, chunk records, and the state after each chunk but a row's last."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    c = chunk % row_chunks
    plane = chunks.to(tl.int64) * CHUNK
    scalars = table + MODE_ROWS * M + 2 * (2 * M + UNIT_PAD)
    modes = tl.arange(0, BLOCK)
    mask = modes < M
    lanes, lane_mask = lanes_of(0, M, BLOCK, PACKED)
    nu2 = load_modes(table, NU2, modes, mask, M, EVEN)
    cos = load_modes(table, COS, modes, mask, M, EVEN)
    sin = load_modes(table, SIN, modes, mask, M, EVEN)
    h_re = tl.zeros([BLOCK], tl.float32)
    h_im = tl.zeros([BLOCK], tl.float32)
    if HAS_INITIAL:
        own = initial_state + b.to(tl.int64) * (2 * M)
        gamma = load_modes(table, GAMMA, modes, mask, M, EVEN)
        h_re = tl.load(own + modes, mask=mask & (c == 0), other=0.0).to(tl.float32) / gamma
        h_im = tl.load(own + M + modes, mask=mask & (c == 0), other=0.0).to(tl.float32) / gamma
    total = 0.0
    angle = 0.0
    firsts = tl.zeros([PIECE], tl.int32)
    for piece in range(0, CHUNK, PIECE):
        t = c * CHUNK + piece
        own = records + chunk.to(tl.int64) * CHUNK + piece
        row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * STRIDE_T
        tokens = t + tl.arange(0, PIECE)
        valid = tokens < length
        # Asked for ahead of the logits: nobody waits for them behind.
        if HAS_FIRST:
            flags = tl.load(first + b.to(tl.int64) * length + tokens, mask=valid, other=0).to(tl.int32)
        else:
            flags = tl.zeros([PIECE], tl.int32)
        if SECTORS > 0:
            left = length - t - PIECE
            if (piece + PIECE < CHUNK) & (left > 0):
                prefetch_rows(row + PIECE * STRIDE_T, left, M, STRIDE_T, PIECE, SECTORS)
        if TILES:
            tile_logits(row, table, own, plane, length - t, M, STRIDE_T, PIECE, TAIL)
        else:
            for r in range(0, PIECE, STEP):
                row_logits(
                    row + r * STRIDE_T,
                    table,
                    own + r,
                    plane,
                    length - t - r,
                    M,
                    STRIDE_T,
                    STEP,
                    LEVELS,
                    BLOCK,
                    1,
                    PER_THREAD,
                    EVEN,
                    TAIL,
                    PACKED,
                )
        tl.debug_barrier()
        stretches, deltas = token_records(own, plane, scalars, valid, flags, SAVE, PIECE)
        total += tl.sum(stretches)
        angle += tl.sum(deltas)
        firsts += flags
        tl.debug_barrier()
        if c < row_chunks - 1:
            marks = tl.sum(flags.to(tl.int64) << tl.arange(0, PIECE), axis=0)
            for start in range(0, PIECE, STEP):
                rows = load_rows(row, 0, PIECE, lanes, lane_mask, M, STRIDE_T, STEP, EVEN, False, PACKED)
                if HAS_FIRST and BRANCH and (marks >> start) & ((1 << STEP) - 1) == 0:
                    # Few steps hold a first token: the others run without selects.
                    h_re, h_im = _walk(rows, own, plane, nu2, cos, sin, h_re, h_im, STEP, BLOCK, PACKED, False)
                else:
                    h_re, h_im = _walk(rows, own, plane, nu2, cos, sin, h_re, h_im, STEP, BLOCK, PACKED, HAS_FIRST)
                row += STEP * STRIDE_T
                own += STEP
    chunk_record(chunk_records, chunk, chunks, total, angle, tl.sum(firsts))
    if c < row_chunks - 1:
        store_pair(states + chunk.to(tl.int64) * (2 * M), h_re, h_im, modes, mask, M, EVEN)
