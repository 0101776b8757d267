"""Device code of the residual addition and its norm: a program owns some tokens, one after another, whole rows."""

import triton
import triton.language as tl

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def _row(source, row, tokens, columns, inside, D: tl.constexpr, EVEN: tl.constexpr):
    """A token's channels; EVEN promises that the token exists."""
    mask = inside if EVEN else inside & (row < tokens)
    return tl.load(source + row.to(tl.int64) * D + columns, mask=mask, other=0.0)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def residual_norm_kernel(
    x, branch, bias, scale, stream, normed, tokens, EPS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stream and norm of ``TOKENS`` tokens; the next one's values are loaded before this one's are used."""
    begin = tl.program_id(0) * TOKENS
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    gain = 1 + tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    next_x = _row(x, begin, tokens, columns, inside, D, EVEN)
    next_branch = _row(branch, begin, tokens, columns, inside, D, EVEN)
    for i in range(TOKENS):
        row = begin + i
        total = next_x.to(tl.float32) + next_branch.to(tl.float32)
        ahead = begin + tl.minimum(i + 1, TOKENS - 1)
        next_x = _row(x, ahead, tokens, columns, inside, D, EVEN)
        next_branch = _row(branch, ahead, tokens, columns, inside, D, EVEN)
        if BIAS:
            total += shift
        rounded = total.to(stream.dtype.element_ty)
        mask = inside if EVEN else inside & (row < tokens)
        at = row.to(tl.int64) * D + columns
        tl.store(stream + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, axis=0) / D + EPS)
        tl.store(normed + at, (value * root * gain).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def residual_norm_gradients_kernel(
    grad_stream, grad_normed, grad_again, stream, scale, grad_x, partials, tokens, EPS: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr, TWO: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The stream's gradient, and this program's part of the scale's and, with BIAS, the bias's.

    ``partials`` is float32 ``[programs, D]``, or ``[programs, 2 D]`` with BIAS. GIVEN: the stream has a gradient. TWO:
    the norm has two, to be added.
    """
    begin = tl.program_id(0) * TOKENS
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    gain = 1 + tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    of_scale, of_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    next_value = _row(stream, begin, tokens, columns, inside, D, EVEN)
    next_grad = _row(grad_normed, begin, tokens, columns, inside, D, EVEN)
    if TWO:
        next_again = _row(grad_again, begin, tokens, columns, inside, D, EVEN)
    if GIVEN:
        next_given = _row(grad_stream, begin, tokens, columns, inside, D, EVEN)
    for i in range(TOKENS):
        row = begin + i
        value, grad = next_value.to(tl.float32), next_grad.to(tl.float32)
        ahead = begin + tl.minimum(i + 1, TOKENS - 1)
        next_value = _row(stream, ahead, tokens, columns, inside, D, EVEN)
        next_grad = _row(grad_normed, ahead, tokens, columns, inside, D, EVEN)
        if TWO:
            grad += next_again.to(tl.float32)
            next_again = _row(grad_again, ahead, tokens, columns, inside, D, EVEN)
        scaled = grad * gain
        squares, products = tl.reduce((value * value, value * scaled), 0, _both)
        root = tl.rsqrt(squares / D + EPS)
        unit = value * root
        of_scale += grad * unit
        total = root * (scaled - unit * (root * products / D))
        if GIVEN:
            total += next_given.to(tl.float32)
            next_given = _row(grad_stream, ahead, tokens, columns, inside, D, EVEN)
        of_bias += total
        mask = inside if EVEN else inside & (row < tokens)
        tl.store(grad_x + row.to(tl.int64) * D + columns, total.to(grad_x.dtype.element_ty), mask=mask)
    width: tl.constexpr = 2 * D if BIAS else D
    out = partials + tl.program_id(0).to(tl.int64) * width + columns
    tl.store(out, of_scale, mask=inside)
    if BIAS:
        tl.store(out + D, of_bias, mask=inside)
