"""Functions of one value that kernels share."""

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def minus_expm1(z):
    """1 - exp(-z) for z >= 0, without cancellation."""
    series = z * (1 - z / 2 * (1 - z / 3 * (1 - z / 4 * (1 - z / 5 * (1 - z / 6 * (1 - z / 7))))))
    return tl.where(z < 0.03, series, 1 - tl.exp(-z))


@triton.jit
def gelu_share(x):
    """gelu(x) / x in its tanh form: (1 + tanh z) / 2 = sigmoid(2 z), where 2 z = 2 sqrt(2/pi) (x + 0.044715 x^3).

    1 / (1 + e) by a reciprocal root, squared: one instruction where a division takes eight.
    """
    root = tl.rsqrt(1 + tl.exp2(x * (-2.302208198 - 0.1029432396 * x * x)))
    return root * root


@triton.jit
def tanh(x):
    """tanh in x's own precision, relative to small values too."""
    z = x * x
    small = x * (1 - z * (1.0 / 3 - z * (2.0 / 15 - z * (17.0 / 315 - z * (62.0 / 2835 - z * (1382.0 / 155925))))))
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    large = tl.where(x < 0, -large, large)
    return tl.where(tl.abs(x) < 0.2, small, large)


@triton.jit
def small_turn(x):
    """cos and sin of |x| <= 1, to float32's last bit but one: no reduction of the argument, no branch."""
    z = x * x
    c = 1.0 / 24 - z * (1.0 / 720 - z * (1.0 / 40320 - z * (1.0 / 3628800 - z * (1.0 / 479001600))))
    s = 1.0 / 6 - z * (1.0 / 120 - z * (1.0 / 5040 - z * (1.0 / 362880 - z * (1.0 / 39916800))))
    return 1 - z * (0.5 - z * c), x - x * z * s
