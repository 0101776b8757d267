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

from samu_lm.ops.common.elementary import small_turn, tanh
from samu_lm.ops.samu.kernel_rows import lanes_of, load_pair, load_row, stack, touch, unstack, widen, within_thread
from samu_lm.ops.samu.kernel_spectrum import MODE_ROWS, UNIT_PAD

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
        radial_re, radial_im = load_pair(unit + 2 * M + UNIT_PAD, modes, mask, M, EVEN)
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
    radial_bias = tl.load(unit + 4 * M + UNIT_PAD)
    for j in tl.static_range(STEP):
        tl.store(records + 5 * plane + j, totals[j] + phase_bias)
        tl.store(records + 6 * plane + j, totals[STEP + j] + radial_bias)


@triton.jit
def tile_logits(
    row,
    table,
    records,
    plane,
    left,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    TOKENS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """As :func:`row_logits`, of TOKENS tokens as a tile: a warp owns whole rows, so that no sum crosses warps.

    A thread's part of a row is summed in the thread; what is left to exchange is one sum per row and direction. Tiles
    are so narrow that the compiler reads the directions in the layout of the tile: wider ones it would exchange.
    """
    WIDTH: tl.constexpr = 2 * M
    COLUMNS: tl.constexpr = 64
    unit = table + MODE_ROWS * M
    tokens = tl.arange(0, TOKENS)
    inside = (tokens < left)[:, None]
    phase = tl.zeros([TOKENS, COLUMNS], tl.float32)
    radial = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        exists = columns < WIDTH
        at = row + tokens[:, None] * STRIDE_T + columns[None, :]
        if start + COLUMNS > WIDTH:
            tile = tl.load(at, mask=inside & exists[None, :], other=0.0)
            u = tl.load(unit + columns, mask=exists, other=0.0)
            v = tl.load(unit + WIDTH + UNIT_PAD + columns, mask=exists, other=0.0)
        else:
            if TAIL:
                tile = tl.load(at, mask=inside, other=0.0)
            else:
                tile = tl.load(at)
            u = tl.load(unit + columns)
            v = tl.load(unit + WIDTH + UNIT_PAD + columns)
        tile = tile.to(tl.float32)
        phase += tile * u[None, :]
        radial += tile * v[None, :]
    tl.store(records + 5 * plane + tokens, tl.sum(phase, axis=1) + tl.load(unit + WIDTH))
    tl.store(records + 6 * plane + tokens, tl.sum(radial, axis=1) + tl.load(unit + 2 * WIDTH + UNIT_PAD))


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
    turn_cos, turn_sin = small_turn(delta)  # the scale is at most 1
    tl.store(records + plane + i, tl.where(keep, turn_cos, FORGET))
    tl.store(records + 2 * plane + i, turn_sin)
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
    TOUCH: tl.constexpr,
):
    """Token and chunk records; a program owns the whole rows of one chunk."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    start = (chunk % row_chunks) * CHUNK
    plane = chunks.to(tl.int64) * CHUNK
    own = records + chunk.to(tl.int64) * CHUNK
    x_row = x + b.to(tl.int64) * stride_b + start.to(tl.int64) * STRIDE_T
    tokens = start + tl.arange(0, CHUNK)
    valid = tokens < length
    if HAS_FIRST:
        flags = tl.load(first + b.to(tl.int64) * length + tokens, mask=valid, other=0).to(tl.int32)
    else:
        flags = tl.zeros([CHUNK], tl.int32)
    for r in range(0, CHUNK, STEP):
        if TOUCH:
            left = tl.where(r + STEP < CHUNK, length - start - r - STEP, 0)
            for block in tl.static_range(MODE_BLOCKS):
                touch(x_row + (r + STEP) * STRIDE_T, left, block * BLOCK, M, STRIDE_T, STEP, BLOCK, PACKED)
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
    scalars = table + MODE_ROWS * M + 2 * (2 * M + UNIT_PAD)
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
    scalars = table + MODE_ROWS * M + 2 * (2 * M + UNIT_PAD)
    at = b.to(tl.int64) * length + start + i
    tl.store(delta + at, tl.load(scalars) * p, mask=valid)
    tl.store(eta + at, tl.load(scalars + 1) * s / (1 + s * s), mask=valid)
