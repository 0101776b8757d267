"""Kernels of one decoded token between the projections: convolution, recurrence and gate.

Letters: B rows, W channels, K taps, M = W/2 modes, H gate blocks of w = W/H channels.

The convolution's inputs lie in a ring ``[B, K, W]``: the input of token t is at t modulo K, so that no kernel has to
move them and none writes what another program still reads. A row's number of tokens seen says which are valid: tap k
reaches back to token t - k, which exists if the row has seen k tokens, and a row that has seen none starts afresh.
"""

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import minus_expm1, small_turn, tanh
from samu_lm.ops.decode.kernel_linear import let_next_start, wait_for_last


@triton.jit
def _earlier(ring, weight, bias, count, channels, mask, W: tl.constexpr, TAPS: tl.constexpr):
    """What bias and the tokens before this one give to the convolution; weight ``[K, W]``, tap k back in row k."""
    total = tl.load(bias + channels, mask=mask, other=0.0)
    for k in tl.static_range(1, TAPS):
        slot = ((count + (TAPS - k)) % TAPS).to(tl.int32)
        before = tl.load(ring + slot * W + channels, mask=mask & (count >= k), other=0.0)
        total += before * tl.load(weight + k * W + channels, mask=mask, other=0.0)
    return total


@triton.jit
def samu_kernel(
    ring,
    seen,
    weight,
    bias,
    spectrum,
    directions,
    scalars,
    gated,
    state,
    y,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = gated * SAMU(conv(u))`` ``[B, W]``, and state ``[B, W]`` in place; a program owns BLOCK modes of a row.

    spectrum ``[4, M]``: -nu / log 2, cos and sin of theta, gamma. directions ``[2, W]``: unit, phase and radial.
    scalars ``[4]``: their biases, then M^(-1/2) tanh of their amplitudes. Each program works out the controls, two
    sums over the row, for itself: that is cheaper than another kernel.
    """
    let_next_start(OVERLAP)
    M: tl.constexpr = W // 2
    b = tl.program_id(0) // PARTS
    count = tl.load(seen + b)
    ring += b * TAPS * W
    now = ring + (count % TAPS).to(tl.int32) * W
    channels = tl.arange(0, WHOLE)
    inside = channels < W
    earlier = _earlier(ring, weight, bias, count, channels, inside, W, TAPS)
    tap = tl.load(weight + channels, mask=inside, other=0.0)
    phase = tl.load(directions + channels, mask=inside, other=0.0)
    radial = tl.load(directions + W + channels, mask=inside, other=0.0)
    phase_sum = tl.sum(earlier * phase) + tl.load(scalars)
    radial_sum = tl.sum(earlier * radial) + tl.load(scalars + 1)
    phase *= tap
    radial *= tap
    modes = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    mask = modes < M
    x_re = _earlier(ring, weight, bias, count, modes, mask, W, TAPS)
    x_im = _earlier(ring, weight, bias, count, M + modes, mask, W, TAPS)
    tap_re = tl.load(weight + modes, mask=mask, other=0.0)
    tap_im = tl.load(weight + M + modes, mask=mask, other=0.0)
    nu2 = tl.load(spectrum + modes, mask=mask, other=0.0)
    cos = tl.load(spectrum + M + modes, mask=mask, other=0.0)
    sin = tl.load(spectrum + 2 * M + modes, mask=mask, other=0.0)
    gamma = tl.load(spectrum + 3 * M + modes, mask=mask, other=0.0)
    state += b * W
    old_re = tl.load(state + modes, mask=mask, other=0.0)
    old_im = tl.load(state + M + modes, mask=mask, other=0.0)
    wait_for_last(OVERLAP)
    u = tl.load(now + channels, mask=inside, other=0.0)
    x_re += tap_re * tl.load(now + modes, mask=mask, other=0.0)
    x_im += tap_im * tl.load(now + M + modes, mask=mask, other=0.0)
    gate_re = tl.load(gated + b * W + modes, mask=mask, other=0.0)
    gate_im = tl.load(gated + b * W + M + modes, mask=mask, other=0.0)
    p = tanh(tl.sum(u * phase) + phase_sum)
    s = tanh(tl.sum(u * radial) + radial_sum)
    delta = tl.load(scalars + 2) * p
    stretch = tl.exp(tl.load(scalars + 3) * s / (1 + s * s))
    r = tl.exp2(nu2 * stretch)
    cos_delta, sin_delta = small_turn(delta)
    a_re = r * (cos * cos_delta - sin * sin_delta)
    a_im = r * (sin * cos_delta + cos * sin_delta)
    fresh = count == 0
    h_re = gamma * x_re + tl.where(fresh, 0.0, a_re * old_re - a_im * old_im)
    h_im = gamma * x_im + tl.where(fresh, 0.0, a_re * old_im + a_im * old_re)
    tl.store(state + modes, h_re, mask=mask)
    tl.store(state + M + modes, h_im, mask=mask)
    y += b * W
    y_re = tl.maximum(h_re, 0.0, propagate_nan=tl.PropagateNan.ALL)
    y_im = tl.maximum(h_im, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + modes, (y_re * gate_re).to(y.dtype.element_ty), mask=mask)
    tl.store(y + M + modes, (y_im * gate_im).to(y.dtype.element_ty), mask=mask)


@triton.jit
def rglru_kernel(
    ring,
    seen,
    weight,
    bias,
    input_weight,
    input_bias,
    a_weight,
    a_bias,
    decay,
    gated,
    state,
    y,
    W: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = gated * RGLRU(conv(u))`` ``[B, W]``, and state ``[B, W]`` in place.

    Gate weights ``[H, w, w]`` bfloat16, biases ``[W]``; decay ``[W]``: 8 softplus(a_param). A program owns COLUMNS
    channels of a row, all in one gate block, and works out the convolution of that block's w = BLOCK_WIDTH channels.
    """
    let_next_start(OVERLAP)
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = W // BLOCK_WIDTH
    b = pid // (BLOCKS * PARTS)
    h = (pid // PARTS) % BLOCKS
    columns = (pid % PARTS) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < BLOCK_WIDTH
    inputs = tl.arange(0, INPUTS)
    inside = inputs < BLOCK_WIDTH
    at = h * BLOCK_WIDTH * BLOCK_WIDTH + inputs[:, None] * BLOCK_WIDTH + columns[None, :]
    input_map = tl.load(input_weight + at, mask=inside[:, None] & mask[None, :], other=0.0)
    a_map = tl.load(a_weight + at, mask=inside[:, None] & mask[None, :], other=0.0)
    count = tl.load(seen + b)
    ring += b * TAPS * W
    now = ring + (count % TAPS).to(tl.int32) * W
    inputs += h * BLOCK_WIDTH
    columns += h * BLOCK_WIDTH
    block_earlier = _earlier(ring, weight, bias, count, inputs, inside, W, TAPS)
    block_tap = tl.load(weight + inputs, mask=inside, other=0.0)
    x = _earlier(ring, weight, bias, count, columns, mask, W, TAPS)
    tap = tl.load(weight + columns, mask=mask, other=0.0)
    input_shift = tl.load(input_bias + columns, mask=mask, other=0.0)
    a_shift = tl.load(a_bias + columns, mask=mask, other=0.0)
    rate = tl.load(decay + columns, mask=mask, other=0.0)
    old = tl.load(state + b * W + columns, mask=mask, other=0.0)
    wait_for_last(OVERLAP)
    u = tl.load(now + inputs, mask=inside, other=0.0)
    x += tap * tl.load(now + columns, mask=mask, other=0.0)
    gate = tl.load(gated + b * W + columns, mask=mask, other=0.0)
    block = (block_earlier + block_tap * u)[:, None]
    i = tl.sigmoid(tl.sum(input_map.to(tl.float32) * block, axis=0) + input_shift)
    r = tl.sigmoid(tl.sum(a_map.to(tl.float32) * block, axis=0) + a_shift)
    log_a = -rate * r
    fresh = count == 0
    multiplier = tl.where(fresh, 1.0, tl.sqrt(minus_expm1(-2 * log_a)))
    new = multiplier * (i * x) + tl.where(fresh, 0.0, tl.exp(log_a) * old)
    tl.store(state + b * W + columns, new, mask=mask)
    tl.store(y + b * W + columns, (new * gate).to(y.dtype.element_ty), mask=mask)
