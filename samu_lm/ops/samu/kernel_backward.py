"""SAMU kernels of the backward pass: each chunk's own adjoint, then the gradients.

Shapes as in ``kernel_scan``; adjoints ``[B * N, 2M]`` float32. With d_t the incoming gradient where the rectifier let
the output through, the gradient of a loss with respect to h_t is

    g_t = d_t + m_t,    m_t = conj(a_{t+1}) g_{t+1}   (0 where t + 1 is a first token)

and m is what passes from chunk to chunk, last to first. From it, with p_t = a_t h_{t-1}:

    grad x_t = gamma g_t,   grad log|a_t| = Re(conj(g_t) p_t),   grad arg a_t = Im(g_t conj(p_t)),
    grad gamma = sum over t of Re(conj(g_t) x_t)

States are kept over gamma and adjoints times gamma: their products, which are all that is needed, stay what they are,
and grad x is the adjoint itself.
"""

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.samu.kernel_rank_two import token_gradients
from samu_lm.ops.samu.kernel_rows import (
    advance,
    kept_state,
    kept_states,
    lanes_of,
    load_modes,
    load_pair,
    load_record,
    load_row,
    load_rows,
    prefetch_rows,
    since_kept,
    stack,
    store_pair,
    touch,
    transition,
    unstack,
    widen,
    within_thread,
)
from samu_lm.ops.samu.kernel_spectrum import COS, GAMMA, MODE_ROWS, NU2, SIN, UNIT_PAD


@triton.jit
def _load_signs(signs, token, M, modes, mask, STEP: tl.constexpr, WORD: tl.constexpr, EVEN: tl.constexpr):
    """Rectifier bits of STEP tokens from token on, the last token's lowest."""
    re, im = load_pair(signs + token // WORD * (2 * M), modes, mask, M, EVEN)
    shift = WORD - STEP - (token % WORD).to(tl.int32)
    return re.to(tl.int32, bitcast=True) >> shift, im.to(tl.int32, bitcast=True) >> shift


@triton.jit
def _through(grad, bits, bit: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The incoming gradient of an output that the rectifier let through, else 0."""
    return tl.where((bits & (1 << bit)) != 0, widen(grad, BLOCK, PACKED), 0.0)


@triton.jit
def _message(a_re, a_im, g_re, g_im, m_re, m_im, forget, inside, TAIL: tl.constexpr):
    """conj(a_t) g_t for the token before; 0 across a first token; past the end it passes unchanged."""
    next_re = tl.where(forget, 0.0, a_re * g_re + a_im * g_im)
    next_im = tl.where(forget, 0.0, a_re * g_im - a_im * g_re)
    if TAIL:
        next_re = tl.where(inside, next_re, m_re)
        next_im = tl.where(inside, next_im, m_im)
    return next_re, next_im


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def chunk_adjoints_kernel(
    grad_y,
    grad_final_state,
    records,
    table,
    signs,
    adjoints,
    length,
    row_chunks,
    chunks,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Message that leaves each chunk but a row's first, started from zero (a row's last: from grad_final_state)."""
    pid = tl.program_id(0)
    b = pid // MODE_BLOCKS // (row_chunks - 1)
    c = pid // MODE_BLOCKS % (row_chunks - 1) + 1
    chunk = b * row_chunks + c
    modes = (pid % MODE_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    lanes, lane_mask = lanes_of(pid % MODE_BLOCKS, M, BLOCK, PACKED)
    nu2 = load_modes(table, NU2, modes, mask, M, EVEN)
    cos = load_modes(table, COS, modes, mask, M, EVEN)
    sin = load_modes(table, SIN, modes, mask, M, EVEN)
    gamma = load_modes(table, GAMMA, modes, mask, M, EVEN)
    m_re = tl.zeros([BLOCK], tl.float32)
    m_im = tl.zeros([BLOCK], tl.float32)
    if HAS_FINAL:
        own = grad_final_state + b.to(tl.int64) * (2 * M)
        m_re = tl.load(own + modes, mask=mask & (c == row_chunks - 1), other=0.0).to(tl.float32) * gamma
        m_im = tl.load(own + M + modes, mask=mask & (c == row_chunks - 1), other=0.0).to(tl.float32) * gamma
    plane = chunks.to(tl.int64) * CHUNK
    t = c * CHUNK + CHUNK - STEP
    row = grad_y + (b.to(tl.int64) * length + t) * (2 * M)
    token = chunk.to(tl.int64) * CHUNK + CHUNK - STEP
    rows = load_rows(row, t, length, lanes, lane_mask, M, 2 * M, STEP, EVEN, TAIL, PACKED)
    for back in range(STEP, CHUNK + STEP, STEP):
        bits_re, bits_im = _load_signs(signs, token, M, modes, mask, STEP, WORD, EVEN)
        # The next rows are on their way while these are worked on (past the end: the last ones once more).
        step_back = tl.where(back < CHUNK, STEP, 0)
        row -= step_back * (2 * M)
        upcoming = load_rows(row, t - step_back, length, lanes, lane_mask, M, 2 * M, STEP, EVEN, TAIL, PACKED)
        tl.debug_barrier()  # or the compiler sinks these loads to their first use
        record = records + token
        for j in tl.static_range(STEP - 1, -1, -1):
            stretch, turn_cos, turn_sin, forget = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            dy_re, dy_im = rows[j]
            g_re = gamma * _through(dy_re, bits_re, STEP - 1 - j, BLOCK, PACKED) + m_re
            g_im = gamma * _through(dy_im, bits_im, STEP - 1 - j, BLOCK, PACKED) + m_im
            m_re, m_im = _message(a_re, a_im, g_re, g_im, m_re, m_im, forget, t + j < length, TAIL)
        rows = upcoming
        t -= STEP
        token -= STEP
    store_pair(adjoints + chunk.to(tl.int64) * (2 * M), m_re, m_im, modes, mask, M, EVEN)


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def gradients_kernel(
    x,
    grad_y,
    grad_final_state,
    records,
    table,
    saved_states,
    signs,
    messages,
    grad_x,
    sums,
    spectrum_partials,
    phase_partials,
    radial_partials,
    scalar_partials,
    token_grads,
    grad_initial_state,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    LEVELS: tl.constexpr,
    SAVE_EVERY: tl.constexpr,
    SAVE_SKIP: tl.constexpr,
    CHUNK_STATES: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    PER_THREAD: tl.constexpr,
    FUSED: tl.constexpr,
    REBUILD: tl.constexpr,
    STAGES: tl.constexpr,
    TOUCH: tl.constexpr,
    SECTORS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    FLIP: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of one chunk and one block of modes, STEP tokens at a time from the last to the first.

    The states of STEP tokens are replayed from the saved state before them and kept in registers while the adjoint
    runs back over them. Per token, two sums over the modes are left in ``sums`` ``[MODE_BLOCKS, 2, B * N * C]``; per
    chunk, three sums over the tokens in ``spectrum_partials`` ``[B * N, 3, M]``. With FUSED (one block holds every
    mode) the two sums turn into the gradients of the controls at once, which complete grad_x while it is in registers.
    """
    pid = tl.program_id(0)
    if FLIP:
        pid = tl.num_programs(0) - 1 - pid
    chunk = pid // MODE_BLOCKS
    part = pid % MODE_BLOCKS
    b = chunk // row_chunks
    c = chunk % row_chunks
    modes = part * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    lanes, lane_mask = lanes_of(part, M, BLOCK, PACKED)
    nu2 = load_modes(table, NU2, modes, mask, M, EVEN)
    cos = load_modes(table, COS, modes, mask, M, EVEN)
    sin = load_modes(table, SIN, modes, mask, M, EVEN)
    gamma = load_modes(table, GAMMA, modes, mask, M, EVEN)
    last = c == row_chunks - 1
    own = messages + chunk.to(tl.int64) * (2 * M)
    m_re = tl.load(own + modes, mask=mask & (c < row_chunks - 1), other=0.0)
    m_im = tl.load(own + M + modes, mask=mask & (c < row_chunks - 1), other=0.0)
    if HAS_FINAL:
        own = grad_final_state + b.to(tl.int64) * (2 * M)
        m_re += tl.load(own + modes, mask=mask & last, other=0.0).to(tl.float32) * gamma
        m_im += tl.load(own + M + modes, mask=mask & last, other=0.0).to(tl.float32) * gamma
    by_radius = tl.zeros([BLOCK], tl.float32)
    by_angle = tl.zeros([BLOCK], tl.float32)
    by_gamma = tl.zeros([BLOCK], tl.float32)
    if FUSED:
        unit = table + MODE_ROWS * M
        sum_phase_re = tl.zeros([BLOCK], tl.float32)
        sum_phase_im = tl.zeros([BLOCK], tl.float32)
        sum_radial_re = tl.zeros([BLOCK], tl.float32)
        sum_radial_im = tl.zeros([BLOCK], tl.float32)
    plane = chunks.to(tl.int64) * CHUNK
    token = chunk.to(tl.int64) * CHUNK
    out_sums = sums + 2 * part * plane + token
    for back in tl.range(STEP, CHUNK + STEP, STEP, num_stages=STAGES):
        start = CHUNK - back
        t = c * CHUNK + start
        record = records + token + start
        row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * STRIDE_T
        grad_row = (b.to(tl.int64) * length + t) * (2 * M)
        skipped = since_kept(start, SAVE_EVERY, SAVE_SKIP)
        kept = chunk.to(tl.int64) * CHUNK_STATES + kept_states(start - skipped, SAVE_EVERY, SAVE_SKIP)
        saved = saved_states + kept * (2 * M)
        h_re, h_im = load_pair(saved, modes, mask, M, EVEN)
        if SAVE_EVERY > STEP or SAVE_SKIP > 0:
            # The saved state lies some steps back: walk up to this one without keeping anything.
            early = row - skipped * STRIDE_T
            early_record = record - skipped
            for walked in range(0, skipped, STEP):
                for j in tl.static_range(STEP):
                    inside = t - skipped + walked + j < length
                    x_re, x_im = load_row(early + j * STRIDE_T, lanes, lane_mask, inside, M, EVEN, TAIL, PACKED)
                    stretch, turn_cos, turn_sin, forget = load_record(early_record + j, plane)
                    a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
                    x_re, x_im = widen(x_re, BLOCK, PACKED), widen(x_im, BLOCK, PACKED)
                    h_re, h_im = advance(a_re, a_im, h_re, h_im, x_re, x_im, forget)
                early += STEP * STRIDE_T
                early_record += STEP
        bits_re, bits_im = _load_signs(signs, token + start, M, modes, mask, STEP, WORD, EVEN)
        rows = load_rows(row, t, length, lanes, lane_mask, M, STRIDE_T, STEP, EVEN, TAIL, PACKED)
        dy_row = grad_y + grad_row
        grads = load_rows(dy_row, t, length, lanes, lane_mask, M, 2 * M, STEP, EVEN, TAIL, PACKED)
        if TOUCH:
            # Pull the next step's lines into the cache; nobody waits for the values.
            before = back < CHUNK
            left = tl.where(before, length - (t - STEP), 0)
            touch(row - STEP * STRIDE_T, left, part * BLOCK, M, STRIDE_T, STEP, BLOCK, PACKED)
            touch(dy_row - STEP * 2 * M, left, part * BLOCK, M, 2 * M, STEP, BLOCK, PACKED)
            lines = tl.arange(0, BLOCK // 16)
            line = saved - 2 * M + part * BLOCK + (lines // 2) * 32 + (lines % 2) * M
            tl.load(line, mask=before & (part * BLOCK + (lines // 2) * 32 < M), other=0.0, volatile=True)
        if SECTORS > 0:
            before = length - (t - STEP)
            if (back < CHUNK) & (before > 0):
                prefetch_rows(row - STEP * STRIDE_T, before, M, STRIDE_T, STEP, SECTORS)
                prefetch_rows(dy_row - STEP * 2 * M, before, M, 2 * M, STEP, SECTORS)
                prefetch_rows(saved - 2 * M, 1, M, 2 * M, 1, SECTORS)
        carried_states = ()
        for j in tl.static_range(STEP):
            stretch, turn_cos, turn_sin, forget = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            h_re, h_im = kept_state(h_re, h_im, forget)
            p_re = a_re * h_re - a_im * h_im
            p_im = a_re * h_im + a_im * h_re
            x_re, x_im = rows[j]
            h_re = p_re + widen(x_re, BLOCK, PACKED)
            h_im = p_im + widen(x_im, BLOCK, PACKED)
            carried_states = carried_states + ((p_re, p_im),)
        if REBUILD:
            # Without this the compiler keeps the transitions of the replay for the way back, and spills.
            tl.debug_barrier()
        radius_sums = ()
        angle_sums = ()
        x_grads = ()
        for j in tl.static_range(STEP - 1, -1, -1):
            stretch, turn_cos, turn_sin, forget = load_record(record + j, plane)
            a_re, a_im = transition(nu2, cos, sin, stretch, turn_cos, turn_sin)
            dy_re, dy_im = grads[j]
            x_re, x_im = rows[j]
            p_re, p_im = carried_states[j]
            g_re = gamma * _through(dy_re, bits_re, STEP - 1 - j, BLOCK, PACKED) + m_re
            g_im = gamma * _through(dy_im, bits_im, STEP - 1 - j, BLOCK, PACKED) + m_im
            radius = g_re * p_re + g_im * p_im
            angle = g_im * p_re - g_re * p_im
            by_radius += stretch * radius
            by_angle += angle
            by_gamma += g_re * widen(x_re, BLOCK, PACKED) + g_im * widen(x_im, BLOCK, PACKED)
            radius_sums = (within_thread(nu2 * radius, BLOCK, PER_THREAD),) + radius_sums
            angle_sums = (within_thread(angle, BLOCK, PER_THREAD),) + angle_sums
            if FUSED:
                x_grads = ((g_re, g_im),) + x_grads
            else:
                out = grad_x + grad_row + j * (2 * M)
                dx_re = g_re.to(grad_x.dtype.element_ty)
                dx_im = g_im.to(grad_x.dtype.element_ty)
                if EVEN and not TAIL:
                    tl.store(out + modes, dx_re)
                    tl.store(out + M + modes, dx_im)
                else:
                    tl.store(out + modes, dx_re, mask=mask & (t + j < length))
                    tl.store(out + M + modes, dx_im, mask=mask & (t + j < length))
            m_re, m_im = _message(a_re, a_im, g_re, g_im, m_re, m_im, forget, t + j < length, TAIL)
        if FUSED:
            # Asked for ahead of the exchange; the directions are read again each time for want of registers.
            phase_re, phase_im = load_pair(unit, modes, mask, M, EVEN)
            radial_re, radial_im = load_pair(unit + 2 * M + UNIT_PAD, modes, mask, M, EVEN)
            slopes = ()
            for j in tl.static_range(STEP):
                slopes = slopes + ((tl.load(record + 3 * plane + j), tl.load(record + 4 * plane + j)),)
        stacked = stack(radius_sums + angle_sums, 2 * STEP, LEVELS + 1)
        totals = unstack(tl.sum(stacked, axis=0), LEVELS + 1)
        for j in tl.static_range(STEP):
            tl.store(out_sums + start + j, totals[j])
            tl.store(out_sums + plane + start + j, totals[STEP + j])
        if FUSED:
            for j in tl.static_range(STEP):
                by_phase = totals[STEP + j] * slopes[j][0]
                by_radial = totals[j] * slopes[j][1]
                dx_re, dx_im = x_grads[j]
                x_re, x_im = rows[j]
                sum_phase_re += by_phase * widen(x_re, BLOCK, PACKED)
                sum_phase_im += by_phase * widen(x_im, BLOCK, PACKED)
                sum_radial_re += by_radial * widen(x_re, BLOCK, PACKED)
                sum_radial_im += by_radial * widen(x_im, BLOCK, PACKED)
                dx_re += by_phase * phase_re + by_radial * radial_re
                dx_im += by_phase * phase_im + by_radial * radial_im
                out = grad_x + grad_row + j * (2 * M)
                dx_re = dx_re.to(grad_x.dtype.element_ty)
                dx_im = dx_im.to(grad_x.dtype.element_ty)
                if EVEN and not TAIL:
                    tl.store(out + modes, dx_re)
                    tl.store(out + M + modes, dx_im)
                else:
                    tl.store(out + modes, dx_re, mask=mask & (t + j < length))
                    tl.store(out + M + modes, dx_im, mask=mask & (t + j < length))
    partial = spectrum_partials + chunk.to(tl.int64) * (3 * M)
    tl.store(partial + modes, by_radius, mask=mask)
    tl.store(partial + M + modes, by_angle, mask=mask)
    tl.store(partial + 2 * M + modes, by_gamma / gamma, mask=mask)
    if FUSED:
        partial = chunk.to(tl.int64) * (2 * M)
        store_pair(phase_partials + partial, sum_phase_re, sum_phase_im, modes, mask, M, EVEN)
        store_pair(radial_partials + partial, sum_radial_re, sum_radial_im, modes, mask, M, EVEN)
        # The sums were stored token by token; what is left of them is the parameters' share.
        tl.debug_barrier()
        grads_out = token_grads + token
        token_gradients(
            out_sums,
            plane,
            records + token,
            plane,
            scalar_partials + chunk.to(tl.int64) * 8,
            grads_out,
            grads_out + plane,
            1,
            CHUNK,
        )
    if HAS_INITIAL and c == 0:
        store_pair(grad_initial_state + b.to(tl.int64) * (2 * M), m_re / gamma, m_im / gamma, modes, mask, M, EVEN)
