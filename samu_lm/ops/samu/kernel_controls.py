"""SAMU kernels over tokens: the two controls from x, and the way back from their gradients to x and the directions.

Shapes: x ``[B, L, W]``; token records ``[rows, B * P]`` float32, P = chunks * C the padded length of a row:

    row 0    exp(eta), 0 at a first token and past the end
    rows 1-2 cos(delta), sin(delta); a cosine of 2 marks "forget the old state" there
    rows 3-4 d logit / d delta and d logit / d (sum over modes of (-nu / log 2) Re(conj(g) p)), for the backward pass
    rows 5-6 the logits [x, 1] . unit(direction), phase and radial

Chunk records ``[3, B * chunks]``: sum of exp(eta), or -1 if the chunk holds a first token; cos and sin of the sum of
delta: with them a chunk's product of transitions is a closed form.
"""

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.samu.kernel_rows import lanes_of, load_pair, load_row, stack, unstack, widen, within_thread
from samu_lm.ops.samu.kernel_spectrum import MODE_ROWS, tanh

FORGET = tl.constexpr(2.0)  # in the place of a cosine
LN_2 = tl.constexpr(0.6931471805599453)
MAX_ETA = tl.constexpr(80.0)


@triton.jit
def row_logits(
    row,
    table,
    records,
    plane,
    left,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STEP: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    PER_THREAD: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Logits of the STEP tokens from ``row`` on (the first ``left`` of them exist), into records 5 and 6.

    Modes lie as in the passes over tokens, not in a tile: rows need no change of layout, and one exchange serves
    every sum of the step.
    """
    unit = table + MODE_ROWS * M
    phase = ()
    radial = ()
    for block in tl.static_range(MODE_BLOCKS):
        modes = block * BLOCK + tl.arange(0, BLOCK)
        mask = modes < M
        lanes, lane_mask = lanes_of(block, M, BLOCK, PACKED)
        rows = ()
        for j in tl.static_range(STEP):
            rows = rows + (load_row(row + j * STRIDE_T, lanes, lane_mask, j < left, M, EVEN, TAIL, PACKED),)
        phase_re, phase_im = load_pair(unit, modes, mask, M, EVEN)
        radial_re, radial_im = load_pair(unit + 2 * M + 1, modes, mask, M, EVEN)
        phase_block = ()
        radial_block = ()
        for j in tl.static_range(STEP):
            x_re, x_im = rows[j]
            x_re, x_im = widen(x_re, BLOCK, PACKED), widen(x_im, BLOCK, PACKED)
            by_phase = within_thread(x_re * phase_re + x_im * phase_im, BLOCK, PER_THREAD)
            by_radial = within_thread(x_re * radial_re + x_im * radial_im, BLOCK, PER_THREAD)
            if block > 0:
                by_phase += phase[j]
                by_radial += radial[j]
            phase_block = phase_block + (by_phase,)
            radial_block = radial_block + (by_radial,)
        phase = phase_block
        radial = radial_block
    totals = unstack(tl.sum(stack(phase + radial, 2 * STEP, LEVELS + 1), axis=0), LEVELS + 1)
    phase_bias = tl.load(unit + 2 * M)
    radial_bias = tl.load(unit + 4 * M + 1)
    for j in tl.static_range(STEP):
        tl.store(records + 5 * plane + j, totals[j] + phase_bias)
        tl.store(records + 6 * plane + j, totals[STEP + j] + radial_bias)


@triton.jit
def token_records(records, plane, scalars, valid, first, SAVE: tl.constexpr, TOKENS: tl.constexpr):
    """Rows 0 to 4 of TOKENS tokens from their logits; returns (exp(eta), delta) of the valid ones, else 0."""
    i = tl.arange(0, TOKENS)
    p = tanh(tl.load(records + 5 * plane + i))
    s = tanh(tl.load(records + 6 * plane + i))
    phase_scale = tl.load(scalars)
    radial_scale = tl.load(scalars + 1)
    delta = phase_scale * p
    spread = 1 + s * s
    stretch = tl.exp(radial_scale * s / spread)
    keep = valid & (first == 0)
    tl.store(records + i, tl.where(keep, stretch, 0.0))
    tl.store(records + plane + i, tl.where(keep, tl.cos(delta), FORGET))
    tl.store(records + 2 * plane + i, tl.sin(delta))
    if SAVE:
        slope = (1 - s * s) / spread
        tl.store(records + 3 * plane + i, phase_scale * (1 - p * p))
        tl.store(records + 4 * plane + i, stretch * LN_2 * radial_scale * slope * slope)
    return tl.where(valid, stretch, 0.0), tl.where(valid, delta, 0.0)


@triton.jit
def chunk_record(chunk_records, chunk, chunks, total, angle, firsts):
    """Closed form of a chunk's product of transitions."""
    tl.store(chunk_records + chunk, tl.where(firsts > 0, -1.0, total))
    tl.store(chunk_records + chunks + chunk, tl.cos(angle))
    tl.store(chunk_records + 2 * chunks + chunk, tl.sin(angle))


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def controls_kernel(
    x,
    first,
    table,
    records,
    chunk_records,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    PER_THREAD: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Token and chunk records; a program owns the whole rows of one chunk."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    start = (chunk % row_chunks) * CHUNK
    plane = chunks.to(tl.int64) * CHUNK
    own = records + chunk.to(tl.int64) * CHUNK
    x_row = x + b.to(tl.int64) * stride_b + start.to(tl.int64) * STRIDE_T
    for r in range(0, CHUNK, STEP):
        row_logits(
            x_row + r * STRIDE_T,
            table,
            own + r,
            plane,
            length - start - r,
            M,
            STRIDE_T,
            STEP,
            LEVELS,
            BLOCK,
            MODE_BLOCKS,
            PER_THREAD,
            EVEN,
            TAIL,
            PACKED,
        )
    # The logits were reduced a tile at a time; below, each thread takes a token of its own.
    tl.debug_barrier()
    tokens = start + tl.arange(0, CHUNK)
    valid = tokens < length
    if HAS_FIRST:
        flags = tl.load(first + b.to(tl.int64) * length + tokens, mask=valid, other=0).to(tl.int32)
    else:
        flags = tl.zeros([CHUNK], tl.int32)
    scalars = table + MODE_ROWS * M + 2 * (2 * M + 1)
    stretch, delta = token_records(own, plane, scalars, valid, flags, SAVE, CHUNK)
    chunk_record(chunk_records, chunk, chunks, tl.sum(stretch), tl.sum(delta), tl.sum(flags))


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def given_controls_kernel(
    eta,
    delta,
    first,
    records,
    chunk_records,
    length,
    row_chunks,
    chunks,
    CHUNK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Token records 0 to 2 and chunk records from controls ``[B, L]`` that the caller gives."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    tokens = (chunk % row_chunks) * CHUNK + tl.arange(0, CHUNK)
    valid = tokens < length
    at = b.to(tl.int64) * length + tokens
    if HAS_FIRST:
        flags = tl.load(first + at, mask=valid, other=0).to(tl.int32)
    else:
        flags = tl.zeros([CHUNK], tl.int32)
    log_stretch = tl.load(eta + at, mask=valid, other=0.0).to(tl.float32)
    stretch = tl.exp(tl.where(log_stretch > MAX_ETA, MAX_ETA, log_stretch))  # a NaN stays one
    angle = tl.load(delta + at, mask=valid, other=0.0).to(tl.float32)
    plane = chunks.to(tl.int64) * CHUNK
    own = records + chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    keep = valid & (flags == 0)
    tl.store(own, tl.where(keep, stretch, 0.0))
    tl.store(own + plane, tl.where(keep, tl.cos(angle), FORGET))
    tl.store(own + 2 * plane, tl.sin(angle))
    chunk_record(chunk_records, chunk, chunks, tl.sum(tl.where(valid, stretch, 0.0)), tl.sum(angle), tl.sum(flags))


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def public_controls_kernel(
    x,
    table,
    records,
    eta,
    delta,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE_BLOCKS: tl.constexpr,
    PER_THREAD: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The controls themselves, ``[B, L]``; their logits stay in records 5 and 6 for the backward pass."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    start = (chunk % row_chunks) * CHUNK
    plane = chunks.to(tl.int64) * CHUNK
    own = records + chunk.to(tl.int64) * CHUNK
    x_row = x + b.to(tl.int64) * stride_b + start.to(tl.int64) * STRIDE_T
    for r in range(0, CHUNK, STEP):
        row_logits(
            x_row + r * STRIDE_T,
            table,
            own + r,
            plane,
            length - start - r,
            M,
            STRIDE_T,
            STEP,
            LEVELS,
            BLOCK,
            MODE_BLOCKS,
            PER_THREAD,
            EVEN,
            TAIL,
            PACKED,
        )
    tl.debug_barrier()
    i = tl.arange(0, CHUNK)
    valid = start + i < length
    p = tanh(tl.load(own + 5 * plane + i))
    s = tanh(tl.load(own + 6 * plane + i))
    scalars = table + MODE_ROWS * M + 2 * (2 * M + 1)
    at = b.to(tl.int64) * length + start + i
    tl.store(delta + at, tl.load(scalars) * p, mask=valid)
    tl.store(eta + at, tl.load(scalars + 1) * s / (1 + s * s), mask=valid)


@triton.jit
def token_gradients(
    sums,
    sum_stride,
    records,
    plane,
    scalar_partials,
    out_phase,
    out_radial,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Gradients of both logits of TOKENS tokens, and the sums over these tokens that the parameters need.

    sums: ``PARTS`` pairs of planes, each ``sum_stride`` apart: sum over modes of (-nu / log 2) Re(conj(g) p), and of
    the angle's gradient. scalar_partials[8]: sums of the logits' gradients (phase, radial), of those times the
    logits, and of what multiplies the two scales in delta and eta.
    """
    i = tl.arange(0, TOKENS)
    by_radius = tl.zeros([TOKENS], tl.float32)
    by_angle = tl.zeros([TOKENS], tl.float32)
    for part in range(PARTS):
        by_radius += tl.load(sums + (2 * part) * sum_stride + i)
        by_angle += tl.load(sums + (2 * part + 1) * sum_stride + i)
    phase_logit = tl.load(records + 5 * plane + i)
    radial_logit = tl.load(records + 6 * plane + i)
    stretch = tl.load(records + i)
    grad_phase = by_angle * tl.load(records + 3 * plane + i)
    grad_radial = by_radius * tl.load(records + 4 * plane + i)
    tl.store(out_phase + i, grad_phase)
    tl.store(out_radial + i, grad_radial)
    s = tanh(radial_logit)
    tl.store(scalar_partials, tl.sum(grad_phase))
    tl.store(scalar_partials + 1, tl.sum(grad_radial))
    tl.store(scalar_partials + 2, tl.sum(grad_phase * phase_logit))
    tl.store(scalar_partials + 3, tl.sum(grad_radial * radial_logit))
    tl.store(scalar_partials + 4, tl.sum(by_angle * tanh(phase_logit)))
    tl.store(scalar_partials + 5, tl.sum(by_radius * stretch * LN_2 * s / (1 + s * s)))


@triton.jit
def _given_token_gradients(
    grad_eta,
    grad_delta,
    at,
    valid,
    scalars,
    records,
    plane,
    scalar_partials,
    out_phase,
    out_radial,
    TOKENS: tl.constexpr,
):
    """As :func:`token_gradients`, from gradients of eta and delta that the caller gives."""
    i = tl.arange(0, TOKENS)
    by_eta = tl.load(grad_eta + at, mask=valid, other=0.0).to(tl.float32)
    by_delta = tl.load(grad_delta + at, mask=valid, other=0.0).to(tl.float32)
    phase_logit = tl.where(valid, tl.load(records + 5 * plane + i), 0.0)
    radial_logit = tl.where(valid, tl.load(records + 6 * plane + i), 0.0)
    p = tanh(phase_logit)
    s = tanh(radial_logit)
    spread = 1 + s * s
    slope = (1 - s * s) / spread
    grad_phase = by_delta * tl.load(scalars) * (1 - p * p)
    grad_radial = by_eta * tl.load(scalars + 1) * slope * slope
    tl.store(out_phase + i, grad_phase)
    tl.store(out_radial + i, grad_radial)
    tl.store(scalar_partials, tl.sum(grad_phase))
    tl.store(scalar_partials + 1, tl.sum(grad_radial))
    tl.store(scalar_partials + 2, tl.sum(grad_phase * phase_logit))
    tl.store(scalar_partials + 3, tl.sum(grad_radial * radial_logit))
    tl.store(scalar_partials + 4, tl.sum(by_delta * p))
    tl.store(scalar_partials + 5, tl.sum(by_eta * s / spread))


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def rank_two_kernel(
    x,
    grad_x,
    grad_eta,
    grad_delta,
    sums,
    table,
    records,
    token_grads,
    direction_partials,
    scalar_partials,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    GIVEN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Adds the controls' part to grad_x and sums the directions' gradients; a program owns one chunk's whole rows.

    With GIVEN the controls' gradients are inputs and grad_x is written, not added to.
    """
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    start = (chunk % row_chunks) * CHUNK
    plane = chunks.to(tl.int64) * CHUNK
    width = 2 * M
    own = records + chunk.to(tl.int64) * CHUNK
    scalars = scalar_partials + chunk.to(tl.int64) * 8
    grads = token_grads + chunk.to(tl.int64) * CHUNK
    if GIVEN:
        tokens = start + tl.arange(0, CHUNK)
        at = b.to(tl.int64) * length + tokens
        unit_scalars = table + MODE_ROWS * M + 2 * (width + 1)
        _given_token_gradients(
            grad_eta, grad_delta, at, tokens < length, unit_scalars, own, plane, scalars, grads, grads + plane, CHUNK
        )
    else:
        own_sums = sums + chunk.to(tl.int64) * CHUNK
        token_gradients(own_sums, plane, own, plane, scalars, grads, grads + plane, PARTS, CHUNK)
    tl.debug_barrier()
    unit = table + MODE_ROWS * M
    x_row = x + b.to(tl.int64) * stride_b + start.to(tl.int64) * STRIDE_T
    grad_row = grad_x + (b.to(tl.int64) * length + start) * width
    partial = direction_partials + chunk.to(tl.int64) * (2 * width)
    rows = tl.arange(0, ROWS)
    for first_column in range(0, width, BLOCK):
        columns = first_column + tl.arange(0, BLOCK)
        inside = columns < width
        u = tl.load(unit + columns, mask=inside, other=0.0)
        v = tl.load(unit + (width + 1) + columns, mask=inside, other=0.0)
        phase = tl.zeros([ROWS, BLOCK], tl.float32)
        radial = tl.zeros([ROWS, BLOCK], tl.float32)
        for r in range(0, CHUNK, ROWS):
            t = r + rows
            if EVEN:
                mask = (start + t < length)[:, None]
            else:
                mask = (start + t < length)[:, None] & inside[None, :]
            by_phase = tl.load(grads + t)
            by_radial = tl.load(grads + plane + t)
            value = tl.load(x_row + t[:, None] * STRIDE_T + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            phase += value * by_phase[:, None]
            radial += value * by_radial[:, None]
            update = by_phase[:, None] * u[None, :] + by_radial[:, None] * v[None, :]
            at_grad = grad_row + t[:, None] * width + columns[None, :]
            if not GIVEN:
                update += tl.load(at_grad, mask=mask, other=0.0).to(tl.float32)
            tl.store(at_grad, update.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(partial + columns, tl.sum(phase, axis=0), mask=inside)
        tl.store(partial + width + columns, tl.sum(radial, axis=0), mask=inside)


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def scan_token_gradients_kernel(
    sums,
    records,
    grad_eta,
    grad_delta,
    length,
    row_chunks,
    chunks,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gradients of given controls, ``[B, L]``, from the gradients pass's sums over modes."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    tokens = (chunk % row_chunks) * CHUNK + tl.arange(0, CHUNK)
    plane = chunks.to(tl.int64) * CHUNK
    own = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    by_radius = tl.zeros([CHUNK], tl.float32)
    by_angle = tl.zeros([CHUNK], tl.float32)
    for part in range(PARTS):
        by_radius += tl.load(sums + (2 * part) * plane + own)
        by_angle += tl.load(sums + (2 * part + 1) * plane + own)
    stretch = tl.load(records + own)
    at = b.to(tl.int64) * length + tokens
    tl.store(grad_eta + at, stretch * by_radius * LN_2, mask=tokens < length)
    tl.store(grad_delta + at, by_angle, mask=tokens < length)
