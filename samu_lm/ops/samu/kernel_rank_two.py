"""SAMU kernels from the controls' gradients to those of x, of the directions and of given controls.

Shapes as in ``kernel_controls``. Both controls depend on x through one product with a direction each, so that their
share of grad_x is a matrix of rank two, and the directions' gradients are two weighted sums of the rows of x.
"""

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import tanh
from samu_lm.ops.samu.kernel_controls import LN_2
from samu_lm.ops.samu.kernel_spectrum import MODE_ROWS, UNIT_PAD

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def token_gradients(
    sums,
    sum_stride,
    records,
    plane,
    scalar_partials,
    out_phase,
    out_radial,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Gradients of both logits of TOKENS tokens, and the sums over these tokens that the parameters need.

    sums: ``PARTS`` pairs of planes, each ``sum_stride`` apart: sum over modes of (-nu / log 2) Re(conj(g) p), and of
    the angle's gradient. scalar_partials[8]: sums of the logits' gradients (phase, radial), of those times the
    logits, and of what multiplies the two scales in delta and eta.
    """
    i = tl.arange(0, TOKENS)
    by_radius = tl.zeros([TOKENS], tl.float32)
    by_angle = tl.zeros([TOKENS], tl.float32)
    for part in range(PARTS):
        by_radius += tl.load(sums + (2 * part) * sum_stride + i)
        by_angle += tl.load(sums + (2 * part + 1) * sum_stride + i)
    phase_logit = tl.load(records + 5 * plane + i)
    radial_logit = tl.load(records + 6 * plane + i)
    stretch = tl.load(records + i)
    grad_phase = by_angle * tl.load(records + 3 * plane + i)
    grad_radial = by_radius * tl.load(records + 4 * plane + i)
    tl.store(out_phase + i, grad_phase)
    tl.store(out_radial + i, grad_radial)
    s = tanh(radial_logit)
    tl.store(scalar_partials, tl.sum(grad_phase))
    tl.store(scalar_partials + 1, tl.sum(grad_radial))
    tl.store(scalar_partials + 2, tl.sum(grad_phase * phase_logit))
    tl.store(scalar_partials + 3, tl.sum(grad_radial * radial_logit))
    tl.store(scalar_partials + 4, tl.sum(by_angle * tanh(phase_logit)))
    tl.store(scalar_partials + 5, tl.sum(by_radius * stretch * LN_2 * s / (1 + s * s)))


@triton.jit
def _given_token_gradients(
    grad_eta,
    grad_delta,
    at,
    valid,
    scalars,
    records,
    plane,
    scalar_partials,
    out_phase,
    out_radial,
    TOKENS: tl.constexpr,
):
    """As :func:`token_gradients`, from gradients of eta and delta that the caller gives."""
    i = tl.arange(0, TOKENS)
    by_eta = tl.load(grad_eta + at, mask=valid, other=0.0).to(tl.float32)
    by_delta = tl.load(grad_delta + at, mask=valid, other=0.0).to(tl.float32)
    phase_logit = tl.where(valid, tl.load(records + 5 * plane + i), 0.0)
    radial_logit = tl.where(valid, tl.load(records + 6 * plane + i), 0.0)
    p = tanh(phase_logit)
    s = tanh(radial_logit)
    spread = 1 + s * s
    slope = (1 - s * s) / spread
    grad_phase = by_delta * tl.load(scalars) * (1 - p * p)
    grad_radial = by_eta * tl.load(scalars + 1) * slope * slope
    tl.store(out_phase + i, grad_phase)
    tl.store(out_radial + i, grad_radial)
    tl.store(scalar_partials, tl.sum(grad_phase))
    tl.store(scalar_partials + 1, tl.sum(grad_radial))
    tl.store(scalar_partials + 2, tl.sum(grad_phase * phase_logit))
    tl.store(scalar_partials + 3, tl.sum(grad_radial * radial_logit))
    tl.store(scalar_partials + 4, tl.sum(by_delta * p))
    tl.store(scalar_partials + 5, tl.sum(by_eta * s / spread))


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def rank_two_kernel(
    x,
    grad_x,
    grad_eta,
    grad_delta,
    sums,
    table,
    records,
    token_grads,
    phase_partials,
    radial_partials,
    scalar_partials,
    length,
    row_chunks,
    chunks,
    stride_b,
    M: tl.constexpr,
    STRIDE_T: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    GIVEN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Adds the controls' part to grad_x and sums the directions' gradients; a program owns one chunk's whole rows.

    With GIVEN the controls' gradients are inputs and grad_x is written, not added to.
    """
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    start = (chunk % row_chunks) * CHUNK
    plane = chunks.to(tl.int64) * CHUNK
    width = 2 * M
    own = records + chunk.to(tl.int64) * CHUNK
    scalars = scalar_partials + chunk.to(tl.int64) * 8
    grads = token_grads + chunk.to(tl.int64) * CHUNK
    if GIVEN:
        tokens = start + tl.arange(0, CHUNK)
        at = b.to(tl.int64) * length + tokens
        unit_scalars = table + MODE_ROWS * M + 2 * (width + UNIT_PAD)
        _given_token_gradients(
            grad_eta, grad_delta, at, tokens < length, unit_scalars, own, plane, scalars, grads, grads + plane, CHUNK
        )
    else:
        own_sums = sums + chunk.to(tl.int64) * CHUNK
        token_gradients(own_sums, plane, own, plane, scalars, grads, grads + plane, PARTS, CHUNK)
    tl.debug_barrier()
    unit = table + MODE_ROWS * M
    x_row = x + b.to(tl.int64) * stride_b + start.to(tl.int64) * STRIDE_T
    grad_row = grad_x + (b.to(tl.int64) * length + start) * width
    partial = chunk.to(tl.int64) * width
    rows = tl.arange(0, ROWS)
    for first_column in range(0, width, BLOCK):
        columns = first_column + tl.arange(0, BLOCK)
        inside = columns < width
        u = tl.load(unit + columns, mask=inside, other=0.0)
        v = tl.load(unit + (width + UNIT_PAD) + columns, mask=inside, other=0.0)
        phase = tl.zeros([ROWS, BLOCK], tl.float32)
        radial = tl.zeros([ROWS, BLOCK], tl.float32)
        for r in range(0, CHUNK, ROWS):
            t = r + rows
            if EVEN:
                mask = (start + t < length)[:, None]
            else:
                mask = (start + t < length)[:, None] & inside[None, :]
            by_phase = tl.load(grads + t)
            by_radial = tl.load(grads + plane + t)
            value = tl.load(x_row + t[:, None] * STRIDE_T + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            phase += value * by_phase[:, None]
            radial += value * by_radial[:, None]
            update = by_phase[:, None] * u[None, :] + by_radial[:, None] * v[None, :]
            at_grad = grad_row + t[:, None] * width + columns[None, :]
            if not GIVEN:
                update += tl.load(at_grad, mask=mask, other=0.0).to(tl.float32)
            tl.store(at_grad, update.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(phase_partials + partial + columns, tl.sum(phase, axis=0), mask=inside)
        tl.store(radial_partials + partial + columns, tl.sum(radial, axis=0), mask=inside)


@triton.jit(do_not_specialize=["length", "row_chunks", "chunks"])
def scan_token_gradients_kernel(
    sums,
    records,
    grad_eta,
    grad_delta,
    length,
    row_chunks,
    chunks,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gradients of given controls, ``[B, L]``, from the gradients pass's sums over modes."""
    chunk = tl.program_id(0)
    b = chunk // row_chunks
    tokens = (chunk % row_chunks) * CHUNK + tl.arange(0, CHUNK)
    plane = chunks.to(tl.int64) * CHUNK
    own = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    by_radius = tl.zeros([CHUNK], tl.float32)
    by_angle = tl.zeros([CHUNK], tl.float32)
    for part in range(PARTS):
        by_radius += tl.load(sums + (2 * part) * plane + own)
        by_angle += tl.load(sums + (2 * part + 1) * plane + own)
    stretch = tl.load(records + own)
    at = b.to(tl.int64) * length + tokens
    tl.store(grad_eta + at, stretch * by_radius * LN_2, mask=tokens < length)
    tl.store(grad_delta + at, by_angle, mask=tokens < length)
