"""What the convolution's kernels share: the last inputs of a channel, and where first tokens lie.

A program owns one chunk of C tokens of a row and one block of channels and walks the tokens in order, STEP at a time,
with the last K-1 inputs in registers. At a first token that window is selected away, so nothing is multiplied by what
another document left there.
"""

import triton
import triton.language as tl

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit
def load_token(row, channels, mask, inside, EVEN: tl.constexpr, TAIL: tl.constexpr):
    if EVEN:
        if TAIL:
            return tl.load(row + channels, mask=inside, other=0.0)
        return tl.load(row + channels)
    if TAIL:
        mask = mask & inside
    return tl.load(row + channels, mask=mask, other=0.0)


@triton.jit
def is_first(first, at, exists, HAS_FIRST: tl.constexpr):
    if HAS_FIRST:
        return tl.load(first + at, mask=exists, other=0).to(tl.int32) != 0
    return False


@triton.jit
def forget(window, first, REACH: tl.constexpr):
    """The window without what came before a first token."""
    kept = ()
    for k in tl.static_range(REACH):
        kept = kept + (tl.where(first, 0.0, window[k]),)
    return kept


@triton.jit
def push(window, value, REACH: tl.constexpr):
    """The window one token on: ``window[k]`` is the input k + 1 tokens back."""
    moved = (value,)
    for k in tl.static_range(REACH - 1):
        moved = moved + (window[k],)
    return moved


@triton.jit
def window_before(
    x,
    first,
    initial_state,
    b,
    t,
    length,
    stride_b,
    channels,
    mask,
    W: tl.constexpr,
    STRIDE_T: tl.constexpr,
    REACH: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last REACH inputs before token t that t may see."""
    window = ()
    for _k in tl.static_range(REACH):
        window = window + (tl.zeros([BLOCK], tl.float32),)
    for back in tl.static_range(REACH, 0, -1):
        s = t - back
        row = x + b.to(tl.int64) * stride_b + s.to(tl.int64) * STRIDE_T
        value = tl.load(row + channels, mask=mask & (s >= 0) & (s < length), other=0.0).to(tl.float32)
        if HAS_INITIAL:
            own = initial_state + (b.to(tl.int64) * REACH + REACH + s) * W
            before = tl.load(own + channels, mask=mask & (s < 0), other=0.0)
            value += before.to(x.dtype.element_ty).to(tl.float32)
        flag = is_first(first, b.to(tl.int64) * length + s, (s >= 0) & (s < length), HAS_FIRST)
        if HAS_FIRST:
            window = forget(window, flag, REACH)
        window = push(window, value, REACH)
    return window


@triton.jit
def load_taps(weight, channels, mask, TAPS: tl.constexpr):
    """Tap k multiplies the input k tokens back."""
    taps = ()
    for k in tl.static_range(TAPS):
        taps = taps + (tl.load(weight + channels * TAPS + (TAPS - 1 - k), mask=mask, other=0.0).to(tl.float32),)
    return taps
