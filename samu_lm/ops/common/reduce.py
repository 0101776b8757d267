"""Sums over the programs of a pass, in a fixed order: how kernels here add up what many programs found."""

import triton
import triton.language as tl

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def column_sums(source, programs, row_stride, columns, mask, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over ``programs`` rows of a block of columns, ROWS rows at a time."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = source + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
        total += tl.load(at, mask=(rows < programs)[:, None] & mask[None, :], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def column_sums_kernel(source, sums, programs, row_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of all columns of a float32 matrix ``[programs, row_stride]``."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < row_stride
    tl.store(sums + columns, column_sums(source, programs, row_stride, columns, inside, ROWS, BLOCK), mask=inside)
