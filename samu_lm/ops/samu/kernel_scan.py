"""SAMU kernels of the forward pass: each chunk's own state, then the outputs.

Shapes: x, y ``[B, L, 2M]`` (real parts, then imaginary parts); token records and chunk records as in
``kernel_controls``; states ``[B * N, 2M]`` float32 for N chunks of C tokens per row; initial and final state
``[B, 2M]``.

Every state but the initial and the final one is kept over gamma, so that the recurrence adds x as it is.

A program owns one chunk and one block of modes: the modes lie in registers, the tokens run in order, and the next
STEP rows are on their way while STEP rows are worked on. Transitions are rebuilt where they are needed, from cos and
sin of theta and of delta: one exponential per mode and token, and no memory.
"""

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.samu.kernel_rows import (
    advance,
    is_kept,
    lanes_of,
    load_modes,
    load_record,
    load_rows,
    store_pair,
    transition,
    widen,
)
from samu_lm.ops.samu.kernel_spectrum import COS, GAMMA, NU2, SIN


@triton.jit(do_not_specialize=["row_chunks", "chunks"])
def chunk_states_kernel(
    x,
    records,
    table,
    initial_state,
    states,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    EVEN: tl.constexpr,
    FLIP: tl.constexpr,
    PACKED: tl.constexpr,
):
    """State after each chunk but a row's last, started from zero (a row's first chunk: from the initial state)."""
    pid = tl.program_id(0)
    if FLIP:  # the pass before this one ended at the far end: start where the cache is still warm
        pid = tl.num_programs(0) - 1 - pid
    b = pid // MODE_BLOCKS // (row_chunks - 1)
    c = pid // MODE_BLOCKS % (row_chunks - 1)
    chunk = b * row_chunks + c
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    lanes, lane_mask = lanes_of(pid % MODE_BLOCKS, M, BLOCK, PACKED)
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
    plane = chunks.to(tl.int64) * CHUNK
    record = records + chunk.to(tl.int64) * CHUNK
    row = x + b.to(tl.int64) * stride_b + (c * CHUNK).to(tl.int64) * STRIDE_T
    rows = load_rows(row, 0, CHUNK, lanes, lane_mask, M, STRIDE_T, STEP, EVEN, False, PACKED)
    for start in range(0, CHUNK, STEP):
        # The next rows are on their way while these are worked on (past the end: the last ones once more).
        row += tl.where(start + STEP < CHUNK, STEP * STRIDE_T, 0)
        upcoming = load_rows(row, 0, CHUNK, lanes, lane_mask, M, STRIDE_T, STEP, EVEN, False, PACKED)
        tl.debug_barrier()  # or the compiler sinks these loads to their first use
        for j in tl.static_range(STEP):
            stretch, turn_cos, turn_sin, forget = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            x_re, x_im = rows[j]
            h_re, h_im = advance(a_re, a_im, h_re, h_im, widen(x_re, BLOCK, PACKED), widen(x_im, BLOCK, PACKED), forget)
        rows = upcoming
        record += STEP
    store_pair(states + chunk.to(tl.int64) * (2 * M), h_re, h_im, modes, mask, M, EVEN)


@triton.jit
def _push_sign(word, h):
    """Appends to a word of bits whether h > 0: the sign of 0 - h, moved in by one funnel shift."""
    sign = (0.0 - h).to(tl.uint32, bitcast=True) >> 31
    return (word << 1) | sign


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def outputs_kernel(
    x,
    records,
    table,
    initial_state,
    carries,
    y,
    final_state,
    saved_states,
    signs,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    SAVE_EVERY: tl.constexpr,
    SAVE_SKIP: tl.constexpr,
    CHUNK_STATES: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    FLIP: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Outputs and final state, each chunk from its carry.

    With SAVE, for the backward pass: the state before every SAVE_EVERY tokens (with SAVE_SKIP all but the last of so
    many), K = CHUNK_STATES a chunk, ``[B * N * K, 2M]``, and which outputs the rectifier let through, a bit per token,
    the last token lowest, in words of WORD tokens, ``[B * N * C / WORD, 2M]``.
    """
    pid = tl.program_id(0)
    if FLIP:
        pid = tl.num_programs(0) - 1 - pid
    chunk = pid // MODE_BLOCKS
    b = chunk // row_chunks
    c = chunk % row_chunks
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    lanes, lane_mask = lanes_of(pid % MODE_BLOCKS, M, BLOCK, PACKED)
    nu2 = load_modes(table, NU2, modes, mask, M, EVEN)
    cos = load_modes(table, COS, modes, mask, M, EVEN)
    sin = load_modes(table, SIN, modes, mask, M, EVEN)
    gamma = load_modes(table, GAMMA, modes, mask, M, EVEN)
    carry = carries + chunk.to(tl.int64) * (2 * M)
    h_re = tl.load(carry + modes, mask=mask & (c > 0), other=0.0)
    h_im = tl.load(carry + M + modes, mask=mask & (c > 0), other=0.0)
    if HAS_INITIAL:
        own = initial_state + b.to(tl.int64) * (2 * M)
        h_re += tl.load(own + modes, mask=mask & (c == 0), other=0.0).to(tl.float32) / gamma
        h_im += tl.load(own + M + modes, mask=mask & (c == 0), other=0.0).to(tl.float32) / gamma
    plane = chunks.to(tl.int64) * CHUNK
    record = records + chunk.to(tl.int64) * CHUNK
    t = c * CHUNK
    row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * STRIDE_T
    out = y + (b.to(tl.int64) * length + t) * (2 * M)
    saved = saved_states + chunk.to(tl.int64) * (CHUNK_STATES * 2 * M)
    word = signs + chunk.to(tl.int64) * (CHUNK // WORD * 2) * M
    word_re = tl.zeros([BLOCK], tl.uint32)
    word_im = tl.zeros([BLOCK], tl.uint32)
    rows = load_rows(row, t, length, lanes, lane_mask, M, STRIDE_T, STEP, EVEN, TAIL, PACKED)
    for start in range(0, CHUNK, STEP):
        if SAVE and is_kept(start, SAVE_EVERY, SAVE_SKIP):
            store_pair(saved, h_re, h_im, modes, mask, M, EVEN)
            saved += 2 * M
        row += tl.where(start + STEP < CHUNK, STEP * STRIDE_T, 0)
        upcoming = load_rows(row, t + STEP, length, lanes, lane_mask, M, STRIDE_T, STEP, EVEN, TAIL, PACKED)
        for j in tl.static_range(STEP):
            stretch, turn_cos, turn_sin, forget = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            x_re, x_im = rows[j]
            x_re, x_im = widen(x_re, BLOCK, PACKED), widen(x_im, BLOCK, PACKED)
            next_re, next_im = advance(a_re, a_im, h_re, h_im, x_re, x_im, forget)
            if TAIL:
                h_re = tl.where(t + j < length, next_re, h_re)
                h_im = tl.where(t + j < length, next_im, h_im)
            else:
                h_re = next_re
                h_im = next_im
            y_re = tl.maximum(gamma * h_re, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
            y_im = tl.maximum(gamma * h_im, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
            if EVEN and not TAIL:
                tl.store(out + modes, y_re)
                tl.store(out + M + modes, y_im)
            else:
                tl.store(out + modes, y_re, mask=mask & (t + j < length))
                tl.store(out + M + modes, y_im, mask=mask & (t + j < length))
            out += 2 * M
            if SAVE:
                word_re = _push_sign(word_re, h_re)
                word_im = _push_sign(word_im, h_im)
        if SAVE and start % WORD == WORD - STEP:
            # Kept among float32 buffers; only the bits count.
            as_float_re = word_re.to(tl.float32, bitcast=True)
            as_float_im = word_im.to(tl.float32, bitcast=True)
            store_pair(word, as_float_re, as_float_im, modes, mask, M, EVEN)
            word += 2 * M
        rows = upcoming
        record += STEP
        t += STEP
    if c == row_chunks - 1:
        store_pair(final_state + b.to(tl.int64) * (2 * M), gamma * h_re, gamma * h_im, modes, mask, M, EVEN)
