"""Kernel of the causal depthwise convolution's forward pass.

Shapes: x, y ``[B, L, W]``; weight ``[W, K]``, ``weight[:, K-1]`` for the current token; state ``[B, K-1, W]``, oldest
first; N = ceil(L / C) chunks of C tokens per row.
"""

import triton
import triton.language as tl

from samu_lm.ops.causal_conv1d.kernel_window import (
    forget,
    holds_first,
    is_first,
    load_taps,
    load_token,
    pieces_with_first,
    push,
    window_before,
)

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit
def _outputs(
    row,
    window,
    taps,
    shift,
    flags,
    out,
    left,
    channels,
    mask,
    W: tl.constexpr,
    STRIDE_T: tl.constexpr,
    REACH: tl.constexpr,
    STEP: tl.constexpr,
    FIRSTS: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Writes the outputs of STEP tokens, of which ``left`` exist; returns the window behind them.

    Without FIRSTS no token is a first one. With it the flags come first: of two bodies that begin alike the compiler
    takes the beginnings together, and what they share then waits in registers.
    """
    firsts = ()
    for j in tl.static_range(STEP):
        firsts = firsts + (is_first(flags, j, j < left, FIRSTS),)
    rows = ()
    for j in tl.static_range(STEP):
        rows = rows + (load_token(row + j * STRIDE_T, channels, mask, j < left, EVEN, TAIL),)
    for j in tl.static_range(STEP):
        inside = j < left
        value = rows[j].to(tl.float32)
        if FIRSTS:
            window = forget(window, firsts[j], REACH)
        total = shift + taps[0] * value
        for k in tl.static_range(REACH):
            total += taps[k + 1] * window[k]
        moved = push(window, value, REACH)
        if TAIL:
            kept = ()
            for k in tl.static_range(REACH):
                kept = kept + (tl.where(inside, moved[k], window[k]),)
            window = kept
        else:
            window = moved
        own = out + j * W
        if EVEN and not TAIL:
            tl.store(own + channels, total.to(out.dtype.element_ty))
        else:
            tl.store(own + channels, total.to(out.dtype.element_ty), mask=mask & inside)
    return window


@triton.jit(do_not_specialize=["length", "row_chunks"])
def conv_kernel(
    x,
    weight,
    bias,
    first,
    initial_state,
    y,
    final_state,
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
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
):
    """y and the final state."""
    REACH: tl.constexpr = TAPS - 1
    pid = tl.program_id(0)
    chunk = pid // CHANNEL_BLOCKS
    b = chunk // row_chunks
    c = chunk % row_chunks
    channels = (pid % CHANNEL_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < W
    t = c * CHUNK
    taps = load_taps(weight, channels, mask, TAPS)
    shift = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    window = window_before(
        x,
        first,
        initial_state,
        b,
        t,
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
    row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * STRIDE_T
    out = y + (b.to(tl.int64) * length + t) * W
    flags = first + b.to(tl.int64) * length + t
    pieces = pieces_with_first(flags, 0, length - t, CHUNK, STEP, HAS_FIRST)
    for start in range(0, CHUNK, STEP):
        left = length - t
        if holds_first(pieces, start // STEP, HAS_FIRST):
            for half in range(0, STEP, STEP // 2):  # all at once takes registers from every piece
                window = _outputs(
                    row + half * STRIDE_T,
                    window,
                    taps,
                    shift,
                    flags + half,
                    out + half * W,
                    left - half,
                    channels,
                    mask,
                    W,
                    STRIDE_T,
                    REACH,
                    STEP // 2,
                    True,
                    EVEN,
                    TAIL,
                )
        else:
            window = _outputs(
                row, window, taps, shift, flags, out, left, channels, mask, W, STRIDE_T, REACH, STEP, False, EVEN, TAIL
            )
        row += STEP * STRIDE_T
        out += STEP * W
        flags += STEP
        t += STEP
    if c == row_chunks - 1:
        for k in tl.static_range(REACH):
            slot = final_state + (b.to(tl.int64) * REACH + REACH - 1 - k) * W
            tl.store(slot + channels, window[k].to(final_state.dtype.element_ty), mask=mask)
