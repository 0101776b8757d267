"""What the convolution's backward pass does with some tokens of its chunk.

Shapes as in ``kernel_conv``. Tokens are counted from the first of the chunk; ``left`` of them exist, and pointers to
``[L, W]`` point at its row. ``mask`` are the channels that exist.
"""

import triton
import triton.language as tl

from samu_lm.ops.causal_conv1d.kernel_window import forget, is_first, load_token, push

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit
def pieces_with_first(first, left, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Numbers of the pieces of STEP tokens that hold a first token, CHUNK // STEP for those that do not."""
    PIECES: tl.constexpr = CHUNK // STEP
    piece = tl.arange(0, PIECES)
    tokens = piece[:, None] * STEP + tl.arange(0, STEP)[None, :]
    flags = tl.load(first + tokens, mask=tokens < left, other=0).to(tl.int32)
    return tl.where(tl.max(flags, axis=1) > 0, piece, PIECES)


@triton.jit
def emit(
    value, open_, t, left, first_kept, grad_final_state, grad_x, grad_initial_state, channels, mask,
    W: tl.constexpr, REACH: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr, EVEN: tl.constexpr,
    TAIL: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of input t, at the row ``grad_x``, once every token that saw it has been passed.

    INNER: t is no token before the chunk's first.
    """
    if HAS_FINAL:
        k = t - (left - REACH)
        wanted = (k >= 0) & (k < REACH) & open_ & (t >= first_kept)
        value += tl.load(grad_final_state + k * W + channels, mask=mask & wanted, other=0.0).to(tl.float32)
    out = value.to(grad_x.dtype.element_ty)
    if INNER and EVEN and not TAIL:
        tl.store(grad_x + channels, out)
    elif INNER and not TAIL:
        tl.store(grad_x + channels, out, mask=mask)
    elif not TAIL:
        tl.store(grad_x + channels, out, mask=mask & (t >= 0))
    else:
        tl.store(grad_x + channels, out, mask=mask & (t >= 0) & (t < left))
    if HAS_INITIAL:
        own = grad_initial_state + (REACH + t) * W
        value = value.to(grad_initial_state.dtype.element_ty)
        tl.store(own + channels, value, mask=mask & (t < 0) & (t >= first_kept))


@triton.jit
def spread(pending, open_, taps, dy, first, REACH: tl.constexpr, HAS_FIRST: tl.constexpr):
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
def finish(
    pending, open_, taps, dy, first, t, left, first_kept, grad_final_state, grad_x, grad_initial_state, channels, mask,
    W: tl.constexpr, REACH: tl.constexpr, FIRSTS: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr,
    EVEN: tl.constexpr, TAIL: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Spreads token t and writes the gradient of the input REACH tokens before it, at the row ``grad_x``."""
    pending, open_ = spread(pending, open_, taps, dy, first, REACH, FIRSTS)
    emit(
        pending[REACH - 1], open_[REACH - 1], t - REACH, left, first_kept, grad_final_state, grad_x, grad_initial_state,
        channels, mask, W, REACH, HAS_FINAL, HAS_INITIAL, EVEN, TAIL, INNER,
    )  # fmt: skip
    return pending, open_


@triton.jit
def pass_pieces(
    state, arrays, taps, start, stop, left, first_kept, channels, mask,
    W: tl.constexpr, STRIDE_T: tl.constexpr, REACH: tl.constexpr, STEP: tl.constexpr, FIRSTS: tl.constexpr,
    HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tokens from start to stop, STEP at a time: writes the gradients of inputs that they finish.

    Returns the state behind them: the window, what is pending, whether it is open, and the sums. ``arrays`` are x,
    grad_y, first, grad_final_state, grad_x and grad_initial_state. Without FIRSTS no token is a first one.
    """
    x, grad_y, first, grad_final_state, grad_x, grad_initial_state = arrays
    window, pending, open_, sums = state
    for t in tl.range(start, stop, STEP, num_stages=1 if FIRSTS else STAGES):
        flags = ()
        for j in tl.static_range(STEP):
            flags = flags + (is_first(first, t + j, t + j < left, FIRSTS),)
        row = x + t * STRIDE_T
        dy_row = grad_y + t * W
        dx_row = grad_x + t * W
        rows = ()
        for j in tl.static_range(STEP):
            inside = t + j < left
            x_row = load_token(row + j * STRIDE_T, channels, mask, inside, EVEN, TAIL)
            rows = rows + ((x_row, load_token(dy_row + j * W, channels, mask, inside, EVEN, TAIL)),)
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
            if REACH > 0:
                pending, open_ = finish(
                    pending, open_, taps, dy, flags[j], t + j, left, first_kept, grad_final_state,
                    dx_row + (j - REACH) * W, grad_initial_state, channels, mask, W, REACH, FIRSTS, HAS_FINAL,
                    HAS_INITIAL, EVEN, TAIL, j >= REACH,
                )  # fmt: skip
                window = push(window, value, REACH)
                pending = push(pending, taps[0] * dy, REACH)
                open_ = push(open_, left > 0, REACH)
            else:
                dx = (taps[0] * dy).to(grad_x.dtype.element_ty)
                tl.store(dx_row + j * W + channels, dx, mask=mask & (t + j < left))
    return window, pending, open_, sums
