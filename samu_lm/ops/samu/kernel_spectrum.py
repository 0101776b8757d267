"""SAMU kernels over parameters: the spectrum's table before a pass, the parameters' gradients after it.

Shapes: M modes, W = 2M. Both run on a few thousand values and work in float64 where an error would grow with the
number of tokens: a mode remembers up to thousands of them.

The table, float32, is what every other kernel reads of the parameters:

    rows of M   0 -nu / log 2                  so that |a| = exp2(row0 * exp(eta))
                1, 2 cos and sin of theta
                3 gamma
                4, 5 cos and sin of C theta    a chunk of C tokens turns by this much
                6, 7 cos and sin of G C theta  and a group of G chunks by this
    then        2 rows of W+1                  unit directions, phase and radial
                4 scalars                      M^(-1/2) tanh(amplitude), phase and radial; 1 / norm, phase and radial
"""

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import minus_expm1, tanh
from samu_lm.ops.common.reduce import column_sums

NU2 = tl.constexpr(0)
COS = tl.constexpr(1)
SIN = tl.constexpr(2)
GAMMA = tl.constexpr(3)
COS_CHUNK = tl.constexpr(4)
SIN_CHUNK = tl.constexpr(5)
COS_GROUP = tl.constexpr(6)
SIN_GROUP = tl.constexpr(7)
MODE_ROWS = tl.constexpr(8)
# A unit direction takes W + UNIT_PAD places, so that both start where four values may be read at once.
UNIT_PAD = tl.constexpr(4)

LOG2_E = tl.constexpr(1.4426950408889634)
# |a| is 0 in float32 far before this; the bound keeps 0 * infinity out of the gradients.
MAX_NU = tl.constexpr(1e38)


def table_size(width: int) -> int:
    """Number of float32 in the table of a mixer of this width."""
    return 8 * (width // 2) + 2 * (width + UNIT_PAD.value) + 4


@triton.jit
def spectrum_table_kernel(
    nu_log,
    theta_log,
    phase_direction,
    radial_direction,
    phase_amplitude,
    radial_amplitude,
    table,
    M: tl.constexpr,
    SPECTRUM_PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIRECTION_BLOCK: tl.constexpr,
):
    """Fills the table: the first programs a block of modes each, the last two (if launched) a direction each."""
    pid = tl.program_id(0)
    if pid < SPECTRUM_PROGRAMS:
        modes = pid * BLOCK + tl.arange(0, BLOCK)
        mask = modes < M
        nu = tl.exp(tl.load(nu_log + modes, mask=mask, other=0.0).to(tl.float64))
        theta = tl.exp(tl.load(theta_log + modes, mask=mask, other=0.0).to(tl.float64))
        gamma = tl.sqrt(minus_expm1(2 * nu)) + 1e-8
        nu2 = -tl.minimum(nu, MAX_NU) * LOG2_E
        nu2 = tl.maximum(nu2, -MAX_NU)
        tl.store(table + NU2 * M + modes, nu2.to(tl.float32), mask=mask)
        tl.store(table + COS * M + modes, tl.cos(theta).to(tl.float32), mask=mask)
        tl.store(table + SIN * M + modes, tl.sin(theta).to(tl.float32), mask=mask)
        tl.store(table + GAMMA * M + modes, gamma.to(tl.float32), mask=mask)
        tl.store(table + COS_CHUNK * M + modes, tl.cos(theta * CHUNK).to(tl.float32), mask=mask)
        tl.store(table + SIN_CHUNK * M + modes, tl.sin(theta * CHUNK).to(tl.float32), mask=mask)
        tl.store(table + COS_GROUP * M + modes, tl.cos(theta * (CHUNK * GROUP)).to(tl.float32), mask=mask)
        tl.store(table + SIN_GROUP * M + modes, tl.sin(theta * (CHUNK * GROUP)).to(tl.float32), mask=mask)
    else:
        which = pid - SPECTRUM_PROGRAMS
        length = 2 * M + 1
        source = phase_direction
        amplitude = phase_amplitude
        if which == 1:
            source = radial_direction
            amplitude = radial_amplitude
        squares = tl.zeros([DIRECTION_BLOCK], tl.float32)
        for start in range(0, length, DIRECTION_BLOCK):
            i = start + tl.arange(0, DIRECTION_BLOCK)
            v = tl.load(source + i, mask=i < length, other=0.0).to(tl.float32)
            squares += v * v
        # The reference divides by max(norm, 1e-12).
        inverse = 1 / tl.maximum(tl.sqrt(tl.sum(squares, axis=0)), 1e-12)
        out = table + MODE_ROWS * M
        for start in range(0, length, DIRECTION_BLOCK):
            i = start + tl.arange(0, DIRECTION_BLOCK)
            v = tl.load(source + i, mask=i < length, other=0.0).to(tl.float32)
            tl.store(out + which * (2 * M + UNIT_PAD) + i, v * inverse, mask=i < length)
        scalars = out + 2 * (2 * M + UNIT_PAD)
        scale = tanh(tl.load(amplitude).to(tl.float32)) / tl.sqrt(tl.full([], M, tl.float32))
        tl.store(scalars + which, scale)
        tl.store(scalars + 2 + which, inverse)


@triton.jit
def _scalar_sum(source, programs, ROWS: tl.constexpr):
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        total += tl.load(source + rows * 8, mask=rows < programs, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def parameter_gradients_kernel(
    nu_log,
    theta_log,
    phase_amplitude,
    radial_amplitude,
    table,
    spectrum_partials,
    spectrum_programs,
    phase_partials,
    radial_partials,
    scalar_partials,
    token_programs,
    gradients,
    M: tl.constexpr,
    SPECTRUM_PROGRAMS: tl.constexpr,
    DIRECTION_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALAR_ROWS: tl.constexpr,
):
    """Reduces the passes' partial sums, in a fixed order, and applies the chain rule down to the parameters.

    spectrum_partials ``[programs, 3, M]``: sums of exp(eta) Re(conj(g) p), of Im(..) (angle) and of Re(conj(g) x).
    phase_partials, radial_partials ``[programs, W]``; scalar_partials ``[programs, 8]``, see ``token_gradients``.
    gradients: nu_log[M], theta_log[M], phase_direction[W+1], radial_direction[W+1], two amplitudes.
    """
    pid = tl.program_id(0)
    if pid < SPECTRUM_PROGRAMS:
        modes = pid * BLOCK + tl.arange(0, BLOCK)
        mask = modes < M
        stride = 3 * M
        by_radius = column_sums(spectrum_partials, spectrum_programs, stride, modes, mask, ROWS, BLOCK)
        by_angle = column_sums(spectrum_partials + M, spectrum_programs, stride, modes, mask, ROWS, BLOCK)
        by_gamma = column_sums(spectrum_partials + 2 * M, spectrum_programs, stride, modes, mask, ROWS, BLOCK)
        nu = tl.exp(tl.load(nu_log + modes, mask=mask, other=0.0).to(tl.float64))
        nu = tl.minimum(tl.maximum(nu, 1e-300), 1e300)
        theta = tl.exp(tl.load(theta_log + modes, mask=mask, other=0.0).to(tl.float64))
        gamma_slope = nu * tl.exp(-2 * nu) / tl.sqrt(minus_expm1(2 * nu))
        grad_nu = by_gamma.to(tl.float64) * gamma_slope - by_radius.to(tl.float64) * nu
        tl.store(gradients + modes, grad_nu.to(tl.float32), mask=mask)
        tl.store(gradients + M + modes, (by_angle.to(tl.float64) * theta).to(tl.float32), mask=mask)
    else:
        block = pid - SPECTRUM_PROGRAMS
        width = 2 * M
        which = block // DIRECTION_PROGRAMS
        columns = (block % DIRECTION_PROGRAMS) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < width
        source = phase_partials
        if which == 1:
            source = radial_partials
        along = column_sums(source, token_programs, width, columns, mask, ROWS, BLOCK)
        # The gradient of v / |v| is the part of the gradient across v, over |v|; its part along v, the sum of
        # (gradient of a logit) * (logit), needs no second pass over the columns.
        radial = _scalar_sum(scalar_partials + 2 + which, token_programs, SCALAR_ROWS)
        unit = table + MODE_ROWS * M + which * (width + UNIT_PAD)
        scalars = table + MODE_ROWS * M + 2 * (width + UNIT_PAD)
        inverse = tl.load(scalars + 2 + which)
        out = gradients + width + which * (width + 1)
        u = tl.load(unit + columns, mask=mask, other=0.0)
        tl.store(out + columns, (along - u * radial) * inverse, mask=mask)
        if block % DIRECTION_PROGRAMS == 0:
            bias = _scalar_sum(scalar_partials + which, token_programs, SCALAR_ROWS)
            tl.store(out + width, (bias - tl.load(unit + width) * radial) * inverse)
            amplitude = phase_amplitude
            if which == 1:
                amplitude = radial_amplitude
            t = tanh(tl.load(amplitude).to(tl.float32))
            by_scale = _scalar_sum(scalar_partials + 4 + which, token_programs, SCALAR_ROWS)
            tl.store(
                gradients + width + 2 * (width + 1) + which,
                by_scale * (1 - t * t) / tl.sqrt(tl.full([], M, tl.float32)),
            )
