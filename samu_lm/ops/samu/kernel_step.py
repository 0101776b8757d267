"""SAMU kernel for one token: the whole mixer in one launch, for decoding.

Shapes: x, y ``[B, 1, 2M]``; parameters as in ``kernel.py``; state ``[B, 2M]`` float32. A program owns one row of the
batch. Launches, not bytes, are what a decoding step costs, so the spectrum is worked out here rather than in a table.
"""

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import minus_expm1, tanh
from samu_lm.ops.samu.kernel_spectrum import MAX_NU

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def _control(x_re, x_im, direction, amplitude, modes, mask, M: tl.constexpr):
    """tanh of the token's product with the unit direction, and the amplitude's tanh over sqrt(M)."""
    u_re = tl.load(direction + modes, mask=mask, other=0.0).to(tl.float32)
    u_im = tl.load(direction + M + modes, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(direction + 2 * M).to(tl.float32)
    norm = tl.sqrt(tl.sum(u_re * u_re + u_im * u_im) + bias * bias)
    logit = (tl.sum(x_re * u_re + x_im * u_im) + bias) / tl.maximum(norm, 1e-12)
    return tanh(logit), tanh(tl.load(amplitude).to(tl.float32)) / tl.sqrt(tl.full([], M, tl.float32))


@triton.jit
def step_kernel(
    x,
    first,
    nu_log,
    theta_log,
    phase_direction,
    radial_direction,
    phase_amplitude,
    radial_amplitude,
    state,
    y,
    final_state,
    stride_b,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """y and the next state of one token per row."""
    b = tl.program_id(0).to(tl.int64)
    modes = tl.arange(0, BLOCK)
    mask = modes < M
    row = x + b * stride_b
    x_re = tl.load(row + modes, mask=mask, other=0.0).to(tl.float32)
    x_im = tl.load(row + M + modes, mask=mask, other=0.0).to(tl.float32)
    nu = tl.exp(tl.load(nu_log + modes, mask=mask, other=0.0).to(tl.float64))
    gamma = (tl.sqrt(minus_expm1(2 * nu)) + 1e-8).to(tl.float32)
    h_re = gamma * x_re
    h_im = gamma * x_im
    if HAS_STATE:
        p, phase_scale = _control(x_re, x_im, phase_direction, phase_amplitude, modes, mask, M)
        s, radial_scale = _control(x_re, x_im, radial_direction, radial_amplitude, modes, mask, M)
        delta = phase_scale * p
        stretch = tl.exp(radial_scale * s / (1 + s * s))
        theta = tl.exp(tl.load(theta_log + modes, mask=mask, other=0.0).to(tl.float64))
        cos = tl.cos(theta).to(tl.float32)
        sin = tl.sin(theta).to(tl.float32)
        r = tl.exp(-tl.minimum(nu, MAX_NU).to(tl.float32) * stretch)
        a_re = r * (cos * tl.cos(delta) - sin * tl.sin(delta))
        a_im = r * (sin * tl.cos(delta) + cos * tl.sin(delta))
        own = state + b * (2 * M)
        old_re = tl.load(own + modes, mask=mask, other=0.0).to(tl.float32)
        old_im = tl.load(own + M + modes, mask=mask, other=0.0).to(tl.float32)
        moved_re = a_re * old_re - a_im * old_im
        moved_im = a_re * old_im + a_im * old_re
        if HAS_FIRST:
            forget = tl.load(first + b).to(tl.int32) != 0
            moved_re = tl.where(forget, 0.0, moved_re)
            moved_im = tl.where(forget, 0.0, moved_im)
        h_re += moved_re
        h_im += moved_im
    out = y + b * (2 * M)
    y_re = tl.maximum(h_re, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
    y_im = tl.maximum(h_im, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
    tl.store(out + modes, y_re, mask=mask)
    tl.store(out + M + modes, y_im, mask=mask)
    own = final_state + b * (2 * M)
    tl.store(own + modes, h_re, mask=mask)
    tl.store(own + M + modes, h_im, mask=mask)
