"""Device code of the gated GELU: a program owns a block of channels of gate and up over some tokens.

JOINED, gate and up are halves of one tensor's rows and both have a bias; otherwise they are tensors of their own, and
the bias is the gate's alone. The joined form takes up's address from the gate's, whatever is given for up: one address
to hold and a constant, not two addresses.
"""

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import gelu_share

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
    gate, up, bias, y, tokens, F: tl.constexpr, JOINED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y of ``TOKENS`` tokens and a block of channels."""
    STRIDE: tl.constexpr = 2 * F if JOINED else F  # of a token in gate and up
    if JOINED:
        up = gate + F
    program = tl.program_id(0)
    columns = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate_bias = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if JOINED:
        up_bias = tl.load(bias + F + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    begin = (program // BLOCKS) * TOKENS
    for start in range(0, TOKENS, ROWS):
        rows = begin + start + tl.arange(0, ROWS)
        mask = _inside(rows, columns, tokens, F, EVEN)
        offset = rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        g = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32) + gate_bias
        u = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
        if JOINED:
            u += up_bias
        value = g * gelu_share(g) * u
        tl.store(y + rows.to(tl.int64)[:, None] * F + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gelu_gradients_kernel(
    grad_y, gate, up, bias, grad_gate, grad_up, partials, tokens, F: tl.constexpr, JOINED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and this program's part of the bias's: float32 ``[programs along tokens, STRIDE]``."""
    STRIDE: tl.constexpr = 2 * F if JOINED else F  # of a token in gate and up
    if JOINED:
        up, grad_up = gate + F, grad_gate + F
    program = tl.program_id(0)
    columns = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate_bias = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_gate = tl.zeros([ROWS, BLOCK], tl.float32)
    if JOINED:
        up_bias = tl.load(bias + F + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        of_up = tl.zeros([ROWS, BLOCK], tl.float32)
    begin = (program // BLOCKS) * TOKENS
    for start in range(0, TOKENS, ROWS):
        rows = begin + start + tl.arange(0, ROWS)
        mask = _inside(rows, columns, tokens, F, EVEN)
        offset = rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        grad = tl.load(grad_y + rows.to(tl.int64)[:, None] * F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32) + gate_bias
        u = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
        if JOINED:
            u += up_bias
        share = gelu_share(g)
        # gelu' = share + x share' with share' = share (1 - share) d(2 z)/dx, z as in gelu_share
        slope = share + g * share * (1 - share) * (1.5957691216057308 + 0.21406444881780076 * g * g)
        d_gate, d_up = grad * u * slope, grad * g * share
        tl.store(grad_gate + offset, d_gate.to(grad_gate.dtype.element_ty), mask=mask)
        tl.store(grad_up + offset, d_up.to(grad_up.dtype.element_ty), mask=mask)
        of_gate += d_gate
        if JOINED:
            of_up += d_up
    out = partials + (program // BLOCKS).to(tl.int64) * STRIDE + columns
    tl.store(out, tl.sum(of_gate, axis=0), mask=inside)
    if JOINED:
        tl.store(out + F, tl.sum(of_up, axis=0), mask=inside)
