"""Kernel of the causal depthwise convolution's forward pass.

Shapes: x, y ``[B, L, W]``; weight ``[W, K]``, ``weight[:, K-1]`` for the current token; state ``[B, K-1, W]``, oldest
first; N = ceil(L / C) chunks of C tokens per row.
"""

import triton
import triton.language as tl

from samu_lm.ops.causal_conv1d.kernel_window import forget, is_first, load_taps, load_token, push, window_before

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


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
    for _start in range(0, CHUNK, STEP):
        rows = ()
        for j in tl.static_range(STEP):
            rows = rows + (load_token(row + j * STRIDE_T, channels, mask, t + j < length, EVEN, TAIL),)
        for j in tl.static_range(STEP):
            inside = t + j < length
            value = rows[j].to(tl.float32)
            if HAS_FIRST:
                window = forget(window, is_first(flags, j, inside, HAS_FIRST), REACH)
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
            if EVEN and not TAIL:
                tl.store(out + channels, total.to(y.dtype.element_ty))
            else:
                tl.store(out + channels, total.to(y.dtype.element_ty), mask=mask & inside)
            out += W
        row += STEP * STRIDE_T
        flags += STEP
        t += STEP
    if c == row_chunks - 1:
        for k in tl.static_range(REACH):
            slot = final_state + (b.to(tl.int64) * REACH + REACH - 1 - k) * W
            tl.store(slot + channels, window[k].to(final_state.dtype.element_ty), mask=mask)
