"""SAMU kernels of the forward pass: each chunk's own state, then the outputs.

Shapes: x, y ``[B, L, 2M]`` (real parts, then imaginary parts); token records and chunk records as in
``kernel_controls``; states ``[B * N, 2M]`` float32 for N chunks of C tokens per row; initial and final state ``[B, 2M]``.

A program owns one chunk and one block of modes: the modes lie in registers, the tokens run in order, STEP rows are
loaded before the first is used. Transitions are rebuilt where they are needed, from cos and sin of theta and of delta:
one exponential per mode and token, and no memory.
"""

import triton
import triton.language as tl

from samu_lm.ops.samu.kernel_spectrum import COS, GAMMA, NU2, SIN


@triton.jit
def load_row(row, modes, mask, inside, M, EVEN: tl.constexpr, TAIL: tl.constexpr):
    """Real and imaginary parts of a token's modes, in their own dtype; 0 where there is no such mode or token."""
    if EVEN:
        if TAIL:
            return tl.load(row + modes, mask=inside, other=0.0), tl.load(row + M + modes, mask=inside, other=0.0)
        return tl.load(row + modes), tl.load(row + M + modes)
    if TAIL:
        mask = mask & inside
    return tl.load(row + modes, mask=mask, other=0.0), tl.load(row + M + modes, mask=mask, other=0.0)


@triton.jit
def load_pair(row, modes, mask, M, EVEN: tl.constexpr):
    """As :func:`load_row`, for float32 rows of states or of the table."""
    if EVEN:
        return tl.load(row + modes), tl.load(row + M + modes)
    return tl.load(row + modes, mask=mask, other=0.0), tl.load(row + M + modes, mask=mask, other=0.0)


@triton.jit
def store_pair(row, re, im, modes, mask, M, EVEN: tl.constexpr):
    """Writes a float32 row of a state."""
    if EVEN:
        tl.store(row + modes, re)
        tl.store(row + M + modes, im)
    else:
        tl.store(row + modes, re, mask=mask)
        tl.store(row + M + modes, im, mask=mask)


@triton.jit
def load_modes(table, row: tl.constexpr, modes, mask, M, EVEN: tl.constexpr):
    """One row of the parameters' table."""
    if EVEN:
        return tl.load(table + row * M + modes)
    return tl.load(table + row * M + modes, mask=mask, other=0.0)


@triton.jit
def load_record(record, plane):
    """exp(eta) or -1, cos(delta), sin(delta) of one token."""
    return tl.load(record), tl.load(record + plane), tl.load(record + 2 * plane)


@triton.jit
def transition(nu2, cos, sin, stretch, turn_cos, turn_sin):
    """exp(-nu exp(eta)) exp(i (theta + delta)); meaningless at a first token, where it must not be used."""
    r = tl.exp2(nu2 * stretch)
    return r * (cos * turn_cos - sin * turn_sin), r * (sin * turn_cos + cos * turn_sin)


@triton.jit
def carried(a_re, a_im, h_re, h_im, stretch):
    """Transition times state; at a first token the old state is selected away, even if it is infinite."""
    forget = stretch < 0
    return tl.where(forget, 0.0, a_re * h_re - a_im * h_im), tl.where(forget, 0.0, a_re * h_im + a_im * h_re)


@triton.jit(do_not_specialize=["row_chunks", "chunks"])
def chunk_states_kernel(
    x,
    records,
    table,
    initial_state,
    states,
    row_chunks,
    chunks,
    M,
    stride_b,
    stride_t,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """State after each chunk but a row's last, started from zero (a row's first chunk: from the initial state)."""
    pid = tl.program_id(0)
    b = pid // MODE_BLOCKS // (row_chunks - 1)
    c = pid // MODE_BLOCKS % (row_chunks - 1)
    chunk = b * row_chunks + c
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    nu2 = load_modes(table, NU2, modes, mask, M, EVEN)
    cos = load_modes(table, COS, modes, mask, M, EVEN)
    sin = load_modes(table, SIN, modes, mask, M, EVEN)
    gamma = load_modes(table, GAMMA, modes, mask, M, EVEN)
    h_re = tl.zeros([BLOCK], tl.float32)
    h_im = tl.zeros([BLOCK], tl.float32)
    if HAS_INITIAL:
        own = initial_state + b.to(tl.int64) * (2 * M)
        h_re = tl.load(own + modes, mask=mask & (c == 0), other=0.0).to(tl.float32)
        h_im = tl.load(own + M + modes, mask=mask & (c == 0), other=0.0).to(tl.float32)
    plane = chunks.to(tl.int64) * CHUNK
    record = records + chunk.to(tl.int64) * CHUNK
    row = x + b.to(tl.int64) * stride_b + (c * CHUNK).to(tl.int64) * stride_t
    for start in range(0, CHUNK, STEP):
        rows = ()
        for j in tl.static_range(STEP):
            rows = rows + (load_row(row + j * stride_t, modes, mask, True, M, EVEN, False),)
        for j in tl.static_range(STEP):
            stretch, turn_cos, turn_sin = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            p_re, p_im = carried(a_re, a_im, h_re, h_im, stretch)
            x_re, x_im = rows[j]
            h_re = p_re + gamma * x_re.to(tl.float32)
            h_im = p_im + gamma * x_im.to(tl.float32)
        row += STEP * stride_t
        record += STEP
    store_pair(states + chunk.to(tl.int64) * (2 * M), h_re, h_im, modes, mask, M, EVEN)


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
    M,
    stride_b,
    stride_t,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    SAVE_EVERY: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Outputs and final state, each chunk from its carry.

    With SAVE, for the backward pass: the state before every SAVE_EVERY tokens, ``[B * N * C / SAVE_EVERY, 2M]``, and
    which outputs the rectifier let through, a bit per token in words of WORD tokens, ``[B * N * C / WORD, 2M]``.
    """
    pid = tl.program_id(0)
    if FLIP:  # the pass before this one ended at the far end: start where the cache is still warm
        pid = tl.num_programs(0) - 1 - pid
    chunk = pid // MODE_BLOCKS
    b = chunk // row_chunks
    c = chunk % row_chunks
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    nu2 = load_modes(table, NU2, modes, mask, M, EVEN)
    cos = load_modes(table, COS, modes, mask, M, EVEN)
    sin = load_modes(table, SIN, modes, mask, M, EVEN)
    gamma = load_modes(table, GAMMA, modes, mask, M, EVEN)
    carry = carries + chunk.to(tl.int64) * (2 * M)
    h_re = tl.load(carry + modes, mask=mask & (c > 0), other=0.0)
    h_im = tl.load(carry + M + modes, mask=mask & (c > 0), other=0.0)
    if HAS_INITIAL:
        own = initial_state + b.to(tl.int64) * (2 * M)
        h_re += tl.load(own + modes, mask=mask & (c == 0), other=0.0).to(tl.float32)
        h_im += tl.load(own + M + modes, mask=mask & (c == 0), other=0.0).to(tl.float32)
    plane = chunks.to(tl.int64) * CHUNK
    record = records + chunk.to(tl.int64) * CHUNK
    t = c * CHUNK
    row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t
    out = y + (b.to(tl.int64) * length + t) * (2 * M)
    saved = saved_states + chunk.to(tl.int64) * (CHUNK // SAVE_EVERY * 2) * M
    word = signs + chunk.to(tl.int64) * (CHUNK // WORD * 2) * M
    word_re = tl.zeros([BLOCK], tl.int32)
    word_im = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, STEP):
        if SAVE and start % SAVE_EVERY == 0:
            store_pair(saved, h_re, h_im, modes, mask, M, EVEN)
            saved += 2 * M
        rows = ()
        for j in tl.static_range(STEP):
            rows = rows + (load_row(row + j * stride_t, modes, mask, t + j < length, M, EVEN, TAIL),)
        bits_re = tl.zeros([BLOCK], tl.int32)
        bits_im = tl.zeros([BLOCK], tl.int32)
        for j in tl.static_range(STEP):
            stretch, turn_cos, turn_sin = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            p_re, p_im = carried(a_re, a_im, h_re, h_im, stretch)
            x_re, x_im = rows[j]
            next_re = p_re + gamma * x_re.to(tl.float32)
            next_im = p_im + gamma * x_im.to(tl.float32)
            if TAIL:
                h_re = tl.where(t + j < length, next_re, h_re)
                h_im = tl.where(t + j < length, next_im, h_im)
            else:
                h_re = next_re
                h_im = next_im
            y_re = tl.maximum(h_re, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
            y_im = tl.maximum(h_im, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
            if EVEN and not TAIL:
                tl.store(out + modes, y_re)
                tl.store(out + M + modes, y_im)
            else:
                tl.store(out + modes, y_re, mask=mask & (t + j < length))
                tl.store(out + M + modes, y_im, mask=mask & (t + j < length))
            out += 2 * M
            if SAVE:
                bits_re |= tl.where(h_re > 0, 1 << j, 0)
                bits_im |= tl.where(h_im > 0, 1 << j, 0)
        if SAVE:
            word_re |= bits_re << (start % WORD)
            word_im |= bits_im << (start % WORD)
            if start % WORD == WORD - STEP:
                # Kept among float32 buffers; only the bits count.
                as_float_re = word_re.to(tl.float32, bitcast=True)
                as_float_im = word_im.to(tl.float32, bitcast=True)
                store_pair(word, as_float_re, as_float_im, modes, mask, M, EVEN)
                word += 2 * M
                word_re = tl.zeros([BLOCK], tl.int32)
                word_im = tl.zeros([BLOCK], tl.int32)
        row += STEP * stride_t
        record += STEP
        t += STEP
    if c == row_chunks - 1:
        store_pair(final_state + b.to(tl.int64) * (2 * M), h_re, h_im, modes, mask, M, EVEN)
