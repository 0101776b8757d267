"""Kernels of the causal depthwise convolution: forward, gradients, and the sum of the parameters' partial gradients.

Shapes: x, y ``[B, L, W]``; weight ``[W, K]``, ``weight[:, K-1]`` for the current token; state ``[B, K-1, W]``, oldest
first; N = ceil(L / C) chunks of C tokens per row.

A program owns one chunk and one block of channels and walks the tokens in order with the last K-1 inputs in registers.
At a first token that window is selected away, so nothing is multiplied by what another document left there.
"""

import triton
import triton.language as tl

from samu_lm.ops.common.reduce import column_sums

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit
def _load(row, channels, mask, inside, EVEN: tl.constexpr, TAIL: tl.constexpr):
    if EVEN:
        if TAIL:
            return tl.load(row + channels, mask=inside, other=0.0)
        return tl.load(row + channels)
    if TAIL:
        mask = mask & inside
    return tl.load(row + channels, mask=mask, other=0.0)


@triton.jit
def _is_first(first, at, exists, HAS_FIRST: tl.constexpr):
    if HAS_FIRST:
        return tl.load(first + at, mask=exists, other=0).to(tl.int32) != 0
    return False


@triton.jit
def _forget(window, first, REACH: tl.constexpr):
    """The window without what came before a first token."""
    kept = ()
    for k in tl.static_range(REACH):
        kept = kept + (tl.where(first, 0.0, window[k]),)
    return kept


@triton.jit
def _push(window, value, REACH: tl.constexpr):
    """The window one token on: ``window[k]`` is the input k + 1 tokens back."""
    moved = (value,)
    for k in tl.static_range(REACH - 1):
        moved = moved + (window[k],)
    return moved


@triton.jit
def _window_before(
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
        flag = _is_first(first, b.to(tl.int64) * length + s, (s >= 0) & (s < length), HAS_FIRST)
        if HAS_FIRST:
            window = _forget(window, flag, REACH)
        window = _push(window, value, REACH)
    return window


@triton.jit
def _taps(weight, channels, mask, TAPS: tl.constexpr):
    """Tap k multiplies the input k tokens back."""
    taps = ()
    for k in tl.static_range(TAPS):
        taps = taps + (tl.load(weight + channels * TAPS + (TAPS - 1 - k), mask=mask, other=0.0).to(tl.float32),)
    return taps


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
    taps = _taps(weight, channels, mask, TAPS)
    shift = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    window = _window_before(
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
            rows = rows + (_load(row + j * STRIDE_T, channels, mask, t + j < length, EVEN, TAIL),)
        for j in tl.static_range(STEP):
            inside = t + j < length
            value = rows[j].to(tl.float32)
            if HAS_FIRST:
                window = _forget(window, _is_first(flags, j, inside, HAS_FIRST), REACH)
            total = shift + taps[0] * value
            for k in tl.static_range(REACH):
                total += taps[k + 1] * window[k]
            moved = _push(window, value, REACH)
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
        grown = grown + (pending[k] + tl.where(reached, taps[k + 1] * dy, 0.0),)
        still = still + (reached,)
    return grown, still


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
    taps = _taps(weight, channels, mask, TAPS)
    window = _window_before(
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
    pending = ()
    open_ = ()
    sums = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for _k in tl.static_range(REACH):
        pending = pending + (tl.zeros([BLOCK], tl.float32),)
        open_ = open_ + (t0 >= 0,)
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
    t = t0
    for _start in range(0, CHUNK, STEP):
        row = x + b.to(tl.int64) * stride_b + t.to(tl.int64) * STRIDE_T
        dy_row = grad_y + (b.to(tl.int64) * length + t) * W
        rows = ()
        for j in tl.static_range(STEP):
            inside = t + j < length
            x_row = _load(row + j * STRIDE_T, channels, mask, inside, EVEN, True)
            rows = rows + ((x_row, _load(dy_row + j * W, channels, mask, inside, EVEN, True)),)
        for j in tl.static_range(STEP):
            flag = _is_first(first, b.to(tl.int64) * length + t + j, t + j < length, HAS_FIRST)
            value, dy = rows[j]
            value = value.to(tl.float32)
            dy = dy.to(tl.float32)
            if HAS_FIRST:
                window = _forget(window, flag, REACH)
            grown = (sums[0] + dy * value,)
            for k in tl.static_range(REACH):
                grown = grown + (sums[k + 1] + dy * window[k],)
            sums = grown + (sums[REACH + 1] + dy,)
            pending, open_ = _spread(pending, open_, taps, dy, flag, REACH, HAS_FIRST)
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
                window = _push(window, value, REACH)
                pending = _push(pending, taps[0] * dy, REACH)
                open_ = _push(open_, t >= 0, REACH)
            else:
                out = grad_x + (b.to(tl.int64) * length + t + j) * W
                tl.store(out + channels, (taps[0] * dy).to(grad_x.dtype.element_ty), mask=mask & (t + j < length))
        t += STEP
    for j in tl.static_range(REACH):
        inside = t + j < length
        flag = _is_first(first, b.to(tl.int64) * length + t + j, inside, HAS_FIRST)
        dy = _load(grad_y + (b.to(tl.int64) * length + t + j) * W, channels, mask, inside, EVEN, True).to(tl.float32)
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
        pending = _push(pending, tl.zeros([BLOCK], tl.float32), REACH)
        open_ = _push(open_, t >= 0, REACH)
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
