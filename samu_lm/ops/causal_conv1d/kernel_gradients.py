"""Kernels of the causal depthwise convolution's backward pass: gradients, and the sum of the parameters' partial ones.

Shapes as in ``kernel_conv``. This pass is bound by its instructions, and first tokens are rare: a piece of STEP tokens
without one runs without flags and selects. (The forward pass waits for memory; there they cost nothing.)
"""

import triton
import triton.language as tl

from samu_lm.ops.causal_conv1d.kernel_window import forget, is_first, load_taps, load_token, push, window_before
from samu_lm.ops.common.reduce import column_sums

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit
def _pieces_with_first(first, at, left, CHUNK: tl.constexpr, STEP: tl.constexpr, HAS_FIRST: tl.constexpr):
    """One bit per piece of STEP tokens of a chunk, piece 0 lowest: does it hold a first token? Of ``left`` tokens."""
    if HAS_FIRST:
        tl.static_assert(CHUNK // STEP <= 32)
        piece = tl.arange(0, CHUNK // STEP)
        tokens = piece[:, None] * STEP + tl.arange(0, STEP)[None, :]
        flags = tl.load(first + at + tokens, mask=tokens < left, other=0).to(tl.int32)
        return tl.sum(tl.max(flags, axis=1) << piece, axis=0)
    return 0


@triton.jit
def _holds_first(pieces, piece, HAS_FIRST: tl.constexpr):
    """Whether a piece holds a first token; known to the compiler where there are none at all."""
    if HAS_FIRST:
        return (pieces >> piece) & 1 != 0
    return False


@triton.jit
def _emit(
    value,
    open_,
    s,
    t0,
    b,
    length,
    grad_final_state,
    grad_x,
    grad_initial_state,
    channels,
    mask,
    W: tl.constexpr,
    REACH: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """Writes the gradient of input s once every token that saw it has been passed."""
    if HAS_FINAL:
        j = s - (length - REACH)
        own = grad_final_state + (b.to(tl.int64) * REACH + j) * W
        wanted = (j >= 0) & (j < REACH) & open_
        value += tl.load(own + channels, mask=mask & wanted, other=0.0).to(tl.float32)
    row = grad_x + (b.to(tl.int64) * length + s) * W
    tl.store(row + channels, value.to(grad_x.dtype.element_ty), mask=mask & (s >= t0) & (s < length))
    if HAS_INITIAL:
        own = grad_initial_state + (b.to(tl.int64) * REACH + REACH + s) * W
        tl.store(own + channels, value.to(grad_initial_state.dtype.element_ty), mask=mask & (s < 0))


@triton.jit
def _spread(pending, open_, taps, dy, first, REACH: tl.constexpr, HAS_FIRST: tl.constexpr):
    """Adds what token t passes back to the REACH inputs before it; a first token closes them for good.

    ``pending[k]`` is the gradient of the input k + 1 tokens back, as far as it is known; ``open_[k]`` whether tokens
    from here on may still see it.
    """
    grown = ()
    still = ()
    for k in tl.static_range(REACH):
        reached = open_[k]
        if HAS_FIRST:
            reached = reached & (first == 0)
        # The sum is selected, not the product: so the two become one multiply-add.
        grown = grown + (tl.where(reached, pending[k] + taps[k + 1] * dy, pending[k]),)
        still = still + (reached,)
    return grown, still


@triton.jit
def _pass_piece(
    x,
    grad_y,
    state,
    taps,
    first,
    t,
    t0,
    first_kept,
    b,
    length,
    stride_b,
    grad_final_state,
    grad_x,
    grad_initial_state,
    channels,
    mask,
    W: tl.constexpr,
    STRIDE_T: tl.constexpr,
    REACH: tl.constexpr,
    STEP: tl.constexpr,
    FIRSTS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """STEP tokens from t on: writes the gradients of inputs that they finish, returns the state behind them.

    The state is the window, what is pending, whether it is open, and the sums. Without FIRSTS no token is a first one.
    With it the flags come first: of two bodies that begin alike the compiler takes the beginnings together, and what
    they share then waits in registers.
    """
    flags = ()
    for j in tl.static_range(STEP):
        flags = flags + (is_first(first, b.to(tl.int64) * length + t + j, t + j < length, FIRSTS),)
    row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * STRIDE_T
    dy_row = grad_y + (b.to(tl.int64) * length + t) * W
    rows = ()
    for j in tl.static_range(STEP):
        inside = t + j < length
        x_row = load_token(row + j * STRIDE_T, channels, mask, inside, EVEN, True)
        rows = rows + ((x_row, load_token(dy_row + j * W, channels, mask, inside, EVEN, True)),)
    window, pending, open_, sums = state
    for j in tl.static_range(STEP):
        value, dy = rows[j]
        value = value.to(tl.float32)
        dy = dy.to(tl.float32)
        if FIRSTS:
            window = forget(window, flags[j], REACH)
        grown = (sums[0] + dy * value,)
        for k in tl.static_range(REACH):
            grown = grown + (sums[k + 1] + dy * window[k],)
        sums = grown + (sums[REACH + 1] + dy,)
        pending, open_ = _spread(pending, open_, taps, dy, flags[j], REACH, FIRSTS)
        if REACH > 0:
            s = t + j - REACH
            _emit(
                pending[REACH - 1],
                open_[REACH - 1],
                s,
                t0,
                b,
                length,
                grad_final_state,
                grad_x,
                grad_initial_state,
                channels,
                mask & (s >= first_kept),
                W,
                REACH,
                HAS_FINAL,
                HAS_INITIAL,
            )
            window = push(window, value, REACH)
            pending = push(pending, taps[0] * dy, REACH)
            open_ = push(open_, t >= 0, REACH)
        else:
            out = grad_x + (b.to(tl.int64) * length + t + j) * W
            tl.store(out + channels, (taps[0] * dy).to(grad_x.dtype.element_ty), mask=mask & (t + j < length))
    return window, pending, open_, sums


@triton.jit(do_not_specialize=["length", "row_chunks"])
def conv_gradients_kernel(
    x,
    weight,
    first,
    initial_state,
    grad_y,
    grad_final_state,
    grad_x,
    grad_initial_state,
    partials,
    length,
    row_chunks,
    stride_b,
    W: tl.constexpr,
    STRIDE_T: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNEL_BLOCKS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """grad_x, the initial state's gradient, and per chunk the sums of the taps' and the bias's gradients.

    partials ``[B * N, K + 1, W]``: row k for the tap k tokens back, the last for the bias. Gradients of inputs are
    finished K - 1 tokens after the input, so a chunk reads K - 1 tokens of grad_y beyond its end.
    """
    REACH: tl.constexpr = TAPS - 1
    pid = tl.program_id(0)
    chunk = pid // CHANNEL_BLOCKS
    b = chunk // row_chunks
    c = chunk % row_chunks
    channels = (pid % CHANNEL_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < W
    t0 = c * CHUNK
    first_kept = t0
    if c == 0:
        first_kept = -REACH * HAS_INITIAL
    taps = load_taps(weight, channels, mask, TAPS)
    window = window_before(
        x,
        first,
        initial_state,
        b,
        t0,
        length,
        stride_b,
        channels,
        mask,
        W,
        STRIDE_T,
        REACH,
        HAS_FIRST,
        HAS_INITIAL,
        BLOCK,
    )
    pieces = _pieces_with_first(first, b.to(tl.int64) * length + t0, length - t0, CHUNK, STEP, HAS_FIRST)
    pending = ()
    open_ = ()
    sums = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for _k in tl.static_range(REACH):
        pending = pending + (tl.zeros([BLOCK], tl.float32),)
        open_ = open_ + (t0 >= 0,)
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
    t = t0
    for start in range(0, CHUNK, STEP):
        state = (window, pending, open_, sums)
        if _holds_first(pieces, start // STEP, HAS_FIRST):
            for half in range(0, STEP, STEP // 2):  # all at once takes registers from every piece
                state = _pass_piece(
                    x,
                    grad_y,
                    state,
                    taps,
                    first,
                    t + half,
                    t0,
                    first_kept,
                    b,
                    length,
                    stride_b,
                    grad_final_state,
                    grad_x,
                    grad_initial_state,
                    channels,
                    mask,
                    W,
                    STRIDE_T,
                    REACH,
                    STEP // 2,
                    True,
                    HAS_FINAL,
                    HAS_INITIAL,
                    EVEN,
                )
        else:
            state = _pass_piece(
                x,
                grad_y,
                state,
                taps,
                first,
                t,
                t0,
                first_kept,
                b,
                length,
                stride_b,
                grad_final_state,
                grad_x,
                grad_initial_state,
                channels,
                mask,
                W,
                STRIDE_T,
                REACH,
                STEP,
                False,
                HAS_FINAL,
                HAS_INITIAL,
                EVEN,
            )
        window, pending, open_, sums = state
        t += STEP
    for j in tl.static_range(REACH):
        inside = t + j < length
        flag = is_first(first, b.to(tl.int64) * length + t + j, inside, HAS_FIRST)
        dy_row = grad_y + (b.to(tl.int64) * length + t + j) * W
        dy = load_token(dy_row, channels, mask, inside, EVEN, True).to(tl.float32)
        pending, open_ = _spread(pending, open_, taps, dy, flag, REACH, HAS_FIRST)
        s = t + j - REACH
        _emit(
            pending[REACH - 1],
            open_[REACH - 1],
            s,
            t0,
            b,
            length,
            grad_final_state,
            grad_x,
            grad_initial_state,
            channels,
            mask & (s >= first_kept),
            W,
            REACH,
            HAS_FINAL,
            HAS_INITIAL,
        )
        pending = push(pending, tl.zeros([BLOCK], tl.float32), REACH)
        open_ = push(open_, t >= 0, REACH)
    partial = partials + chunk.to(tl.int64) * ((TAPS + 1) * W)
    for k in tl.static_range(TAPS + 1):
        tl.store(partial + k * W + channels, sums[k], mask=mask)


@triton.jit(do_not_specialize=["programs"])
def conv_parameters_kernel(
    partials, gradients, programs, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums the chunks' partial gradients: weight ``[W, K]``, then bias ``[W]``."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < (TAPS + 1) * W
    total = column_sums(partials, programs, (TAPS + 1) * W, columns, mask, ROWS, BLOCK)
    back = columns // W
    place = (columns % W) * TAPS + (TAPS - 1 - back)
    tl.store(gradients + tl.where(back < TAPS, place, columns), total, mask=mask)
