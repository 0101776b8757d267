"""Device code of the gated GELU: a program owns a block of channels of both halves over some tokens."""

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import gelu_share
from samu_lm.ops.common.reduce import column_sums

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def _inside(rows, columns, tokens, F: tl.constexpr, EVEN: tl.constexpr):
    """Which of a tile's entries exist; EVEN promises that all do."""
    if EVEN:
        return tl.full([rows.shape[0], columns.shape[0]], True, tl.int1)
    return (rows < tokens)[:, None] & (columns < F)[None, :]


@triton.jit
def gelu_kernel(
    x, bias, y, tokens, F: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y of ``TOKENS`` tokens and a block of channels."""
    program = tl.program_id(0)
    columns = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate_bias = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    up_bias = tl.load(bias + F + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    begin = (program // BLOCKS) * TOKENS
    for start in range(0, TOKENS, ROWS):
        rows = begin + start + tl.arange(0, ROWS)
        mask = _inside(rows, columns, tokens, F, EVEN)
        at = x + rows.to(tl.int64)[:, None] * (2 * F) + columns[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32) + gate_bias
        up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32) + up_bias
        value = gate * gelu_share(gate) * up
        tl.store(y + rows.to(tl.int64)[:, None] * F + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gelu_gradients_kernel(
    grad_y, x, bias, grad_x, partials, tokens, F: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and this program's part of the bias's: float32 ``[programs along tokens, 2F]``."""
    program = tl.program_id(0)
    columns = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate_bias = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    up_bias = tl.load(bias + F + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_gate, of_up = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    begin = (program // BLOCKS) * TOKENS
    for start in range(0, TOKENS, ROWS):
        rows = begin + start + tl.arange(0, ROWS)
        mask = _inside(rows, columns, tokens, F, EVEN)
        offset = rows.to(tl.int64)[:, None] * (2 * F) + columns[None, :]
        grad = tl.load(grad_y + rows.to(tl.int64)[:, None] * F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + gate_bias
        up = tl.load(x + offset + F, mask=mask, other=0.0).to(tl.float32) + up_bias
        share = gelu_share(gate)
        # gelu' = share + x share' with share' = share (1 - share) d(2 z)/dx, z as in gelu_share
        slope = share + gate * share * (1 - share) * (1.5957691216057308 + 0.21406444881780076 * gate * gate)
        d_gate, d_up = grad * up * slope, grad * gate * share
        tl.store(grad_x + offset, d_gate.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(grad_x + offset + F, d_up.to(grad_x.dtype.element_ty), mask=mask)
        of_gate += d_gate
        of_up += d_up
    out = partials + (program // BLOCKS).to(tl.int64) * (2 * F) + columns
    tl.store(out, tl.sum(of_gate, axis=0), mask=inside)
    tl.store(out + F, tl.sum(of_up, axis=0), mask=inside)


@triton.jit
def bias_kernel(partials, grad_bias, programs, F2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the programs' parts of the bias's gradient, always in one order."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F2
    sums = column_sums(partials, programs, F2, columns, inside, ROWS, BLOCK)
    tl.store(grad_bias + columns, sums, mask=inside)
