"""What SAMU's kernels do with a token's row of modes: read it, turn and decay a state, sum over it.

Shapes: a row is ``[2M]``, real parts then imaginary parts; a program holds a block of BLOCK modes, PER_THREAD of them
next to each other in each thread.
"""

import triton
import triton.language as tl

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit
def lanes_of(block, M, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """What :func:`load_row` reads a block of modes by: modes, or pairs of them; and which exist."""
    if PACKED:
        lanes = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        mask = lanes < M // 2
    else:
        lanes = block * BLOCK + tl.arange(0, BLOCK)
        mask = lanes < M
    return lanes, mask


@triton.jit
def load_row(row, lanes, mask, inside, M, EVEN: tl.constexpr, TAIL: tl.constexpr, PACKED: tl.constexpr):
    """Real and imaginary parts of a token's modes as they lie in memory; 0 where there is no such mode or token.

    With PACKED two bfloat16 neighbours stay one word until :func:`widen`, which halves the registers of rows that
    wait for their turn.
    """
    if PACKED:
        words = row.to(tl.pointer_type(tl.int32))
        re = words + lanes
        im = words + M // 2 + lanes
    else:
        re = row + lanes
        im = row + M + lanes
    if EVEN:
        if TAIL:
            return tl.load(re, mask=inside, other=0), tl.load(im, mask=inside, other=0)
        return tl.load(re), tl.load(im)
    if TAIL:
        mask = mask & inside
    return tl.load(re, mask=mask, other=0), tl.load(im, mask=mask, other=0)


@triton.jit
def load_rows(
    row,
    t,
    length,
    lanes,
    mask,
    M,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """STEP rows from token t on, as they lie in memory."""
    rows = ()
    for j in tl.static_range(STEP):
        rows = rows + (load_row(row + j * STRIDE, lanes, mask, t + j < length, M, EVEN, TAIL, PACKED),)
    return rows


@triton.jit
def touch(
    row,
    left,
    start,
    M: tl.constexpr,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Reads one value of every 128-byte line of a block of modes in STEP rows (of which ``left`` exist).

    Nobody waits for the values: the lines are in the cache when their turn comes.
    """
    PER_LINE: tl.constexpr = 64 if PACKED else 32
    PER_ROW: tl.constexpr = 2 * BLOCK // PER_LINE
    i = tl.arange(0, STEP * PER_ROW)
    column = (i % PER_ROW) // 2 * PER_LINE
    at = (i // PER_ROW) * STRIDE + (i % 2) * M + start + column
    tl.load(row + at, mask=(i // PER_ROW < left) & (start + column < M), other=0.0, volatile=True)


@triton.jit
def prefetch_rows(row, left, M: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, SECTORS: tl.constexpr):
    """Asks for TOKENS whole rows (of which ``left`` exist, at least one) to be brought from memory into the L2 cache.

    Unlike :func:`touch` it takes no register that waits. SECTORS: 16 values each, in a row, rounded up to a power of 2.
    """
    i = tl.arange(0, TOKENS * SECTORS)
    column = tl.minimum(i % SECTORS * 16, 2 * M - 1)
    at = row + tl.minimum(i // SECTORS, left - 1) * STRIDE + column
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def widen(row, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """float32 values of half a row that :func:`load_row` read."""
    if PACKED:
        low = (row << 16).to(tl.float32, bitcast=True)
        high = (row & -65536).to(tl.float32, bitcast=True)
        values = tl.reshape(tl.join(low, high), [BLOCK])
    else:
        values = row.to(tl.float32)
    return values


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
    """exp(eta), cos(delta), sin(delta) of one token, and whether it forgets what came before."""
    turn_cos = tl.load(record + plane)
    return tl.load(record), turn_cos, tl.load(record + 2 * plane), turn_cos > 1.5


@triton.jit
def transition(nu2, cos, sin, stretch, turn_cos, turn_sin):
    """exp(-nu exp(eta)) exp(i (theta + delta)); finite but meaningless at a first token, where it must not be used."""
    r = tl.exp2(nu2 * stretch)
    return r * (cos * turn_cos - sin * turn_sin), r * (sin * turn_cos + cos * turn_sin)


@triton.jit
def kept_state(h_re, h_im, forget):
    """The old state, selected away at a first token, even if it is infinite."""
    return tl.where(forget, 0.0, h_re), tl.where(forget, 0.0, h_im)


@triton.jit
def advance(a_re, a_im, h_re, h_im, x_re, x_im, forget):
    """a h + x, without the old state at a first token."""
    h_re, h_im = kept_state(h_re, h_im, forget)
    return turn(a_re, a_im, h_re, h_im, x_re, x_im)


@triton.jit
def turn(a_re, a_im, h_re, h_im, x_re, x_im):
    """a h + x in four multiply-adds: x comes first."""
    return (x_re + a_re * h_re) - a_im * h_im, (x_im + a_re * h_im) + a_im * h_re


@triton.jit
def kept_states(tokens, SAVE_EVERY: tl.constexpr, SAVE_SKIP: tl.constexpr):
    """How many states are kept before the first ``tokens`` tokens of a chunk."""
    due = tokens // SAVE_EVERY
    if SAVE_SKIP > 0:
        due -= due // SAVE_SKIP
    return due


@triton.jit
def is_kept(token, SAVE_EVERY: tl.constexpr, SAVE_SKIP: tl.constexpr):
    """Whether the state before a token of a chunk is kept."""
    kept = token % SAVE_EVERY == 0
    if SAVE_SKIP > 0:
        kept = kept & (token // SAVE_EVERY % SAVE_SKIP != SAVE_SKIP - 1)
    return kept


@triton.jit
def since_kept(token, SAVE_EVERY: tl.constexpr, SAVE_SKIP: tl.constexpr):
    """Tokens between the last state that is kept and a token of a chunk."""
    since = token % SAVE_EVERY
    if SAVE_SKIP > 0:
        since += (token // SAVE_EVERY % SAVE_SKIP + 1) // SAVE_SKIP * SAVE_EVERY
    return since


@triton.jit
def within_thread(values, BLOCK: tl.constexpr, PER_THREAD: tl.constexpr):
    """Sums of neighbours that one thread holds: free of any exchange, and fewer registers to keep."""
    if PER_THREAD == 1:
        return values
    return tl.sum(tl.reshape(values, [BLOCK // PER_THREAD, PER_THREAD]), axis=1)


@triton.jit
def stack(values, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """COUNT vectors as one tensor, vector k at index k of the trailing axes of size 2, most significant bit first."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for k in tl.static_range(COUNT >> (level + 1)):
            joined = joined + (tl.join(values[k], values[k + (COUNT >> (level + 1))]),)
        values = joined
    return values[0]


@triton.jit
def unstack(total, LEVELS: tl.constexpr):
    """The scalars of a tensor of LEVELS axes of size 2, in the order of :func:`stack`."""
    parts = (total,)
    for level in tl.static_range(LEVELS):
        low = ()
        high = ()
        for k in tl.static_range(1 << level):
            first, second = tl.split(parts[k])
            low = low + (first,)
            high = high + (second,)
        parts = low + high
    return parts
