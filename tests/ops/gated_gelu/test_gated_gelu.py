"""The gated GELU's kernels, in the interpreter on a CPU, and its reference, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.ops.common.launch import count_launches
from samu_lm.ops.gated_gelu import gated_gelu, kernel, reference
from tests.ops.support import relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def results(x: Tensor, bias: Tensor, grad: Tensor, backend: str) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), bias.detach().requires_grad_()]
    y = gated_gelu(*leaves, backend=backend)
    return [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(1, 2), (7, 6), (3, 5, 34), (129, 2), (130, 66), (2, 600)])
def test_against_float64(shape: tuple[int, ...], backend: str) -> None:
    x, bias = 2 * torch.randn(shape), torch.randn(shape[-1])
    grad = torch.randn(*shape[:-1], shape[-1] // 2)
    expected = results(x.double(), bias.double(), grad.double(), "reference")
    for value, truth in zip(results(x, bias, grad, backend), expected, strict=True):
        assert relative_error(value, truth) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x, bias, grad = torch.randn(40, 34).to(dtype), torch.randn(34), torch.randn(40, 17).to(dtype)
    expected = results(x.double(), bias.double(), grad.double(), "reference")
    actual = results(x, bias, grad, "triton")
    assert actual[0].dtype == actual[1].dtype == dtype
    for value, truth in zip(actual, expected, strict=True):
        assert relative_error(value, truth) < torch.finfo(dtype).eps


def test_is_what_two_projections_give() -> None:
    x, bias = torch.randn(3, 4, 10), torch.randn(10)
    gate, up = x[..., :5] + bias[:5], x[..., 5:] + bias[5:]
    torch.testing.assert_close(gated_gelu(x, bias), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_far_from_zero() -> None:
    x = torch.tensor([[-1e4, 1e4, 1e15, -1e15, 2.0, 2.0, 2.0, 2.0]])
    for value in results(x, torch.zeros(8), torch.ones(1, 4), "triton"):
        assert torch.isfinite(value).all()


def test_strided_input_and_no_tokens() -> None:
    x, bias = torch.randn(6, 5, 12)[:, ::2, 2:], torch.randn(10)
    torch.testing.assert_close(gated_gelu(x, bias, backend="triton"), reference.gated_gelu(x, bias))
    empty, of_bias = torch.zeros(0, 10, requires_grad=True), bias.clone().requires_grad_()
    gated_gelu(empty, of_bias, backend="triton").sum().backward()
    assert of_bias.grad is not None
    assert not of_bias.grad.any()


def test_launches_and_registration() -> None:
    x, bias = torch.randn(9, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    with count_launches() as names:
        gated_gelu(x, bias, backend="triton").sum().backward()
    assert names == ["gelu_kernel", "gelu_gradients_kernel", "bias_kernel"]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel._gelu, (x, bias), test_utils=tests)


@pytest.mark.parametrize(
    ("x", "bias", "error", "match"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4), TypeError, "x.dtype"),
        (torch.zeros(2, 5), torch.zeros(5), ValueError, "two halves"),
        (torch.zeros(2, 4), torch.zeros(3), ValueError, "bias.shape"),
    ],
)
def test_refusals(x: Tensor, bias: Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        gated_gelu(x, bias)
