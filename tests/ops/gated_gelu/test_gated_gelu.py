"""The gated GELU's kernels, in the interpreter on a CPU, and its reference, against float64.

Joined, gate and up are halves of one tensor and both have a bias; apart, they are two tensors and only gate has one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from samu_lm.ops.common.launch import count_launches
from samu_lm.ops.gated_gelu import gated_gelu, gelu_product, kernel
from tests.ops.support import relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Op = Callable[..., Tensor]
both_forms = pytest.mark.parametrize("op", [gated_gelu, gelu_product], ids=["joined", "apart"])
both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])


def draw(op: Op, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Arguments for a result of the shape: activations in the dtype, then the bias in float32."""
    *tokens, width = shape
    if op is gated_gelu:
        return [2 * torch.randn(*tokens, 2 * width).to(dtype), torch.randn(2 * width)]
    return [2 * torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(width)]


def results(op: Op, inputs: list[Tensor], grad: Tensor, backend: str) -> list[Tensor]:
    """The result and every input's gradient."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    y = op(*leaves, backend=backend)
    return [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def truths(op: Op, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The same in float64."""
    return results(op, [value.double() for value in inputs], grad.double(), "reference")


@both_forms
@both_backends
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 5, 17), (5,), (129, 1), (128, 4), (130, 33), (2, 300), (3, 513)])
def test_against_float64(op: Op, shape: tuple[int, ...], backend: str) -> None:
    inputs, grad = draw(op, *shape), torch.randn(shape)
    expected = truths(op, inputs, grad)
    assert expected[0].dtype == torch.float64
    for value, truth in zip(results(op, inputs, grad, backend), expected, strict=True):
        assert value.shape == truth.shape
        assert relative_error(value, truth) < 1e-6


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(op: Op, dtype: torch.dtype) -> None:
    inputs, grad = draw(op, 140, 17, dtype=dtype), torch.randn(140, 17).to(dtype)
    *activations, of_bias = zip(results(op, inputs, grad, "triton"), truths(op, inputs, grad), strict=True)
    for value, truth in activations:
        assert value.dtype == dtype
        assert relative_error(value, truth) < torch.finfo(dtype).eps
    assert of_bias[0].dtype == torch.float32
    assert relative_error(*of_bias) < 1e-6  # summed before the activations' gradients are rounded


@both_forms
def test_float64_goes_to_the_reference(op: Op) -> None:
    inputs, grad = [value.double() for value in draw(op, 4, 3)], torch.randn(4, 3)
    with count_launches() as names:
        actual = results(op, inputs, grad, "triton")
    assert names == []
    for value, truth in zip(actual, truths(op, inputs, grad), strict=True):
        assert torch.equal(value, truth)


def test_is_what_separate_steps_give() -> None:
    x, bias = draw(gated_gelu, 3, 4, 5)
    gate, up = (x + bias).chunk(2, -1)
    torch.testing.assert_close(gated_gelu(x, bias), F.gelu(gate, approximate="tanh") * up)
    gate, up, bias = draw(gelu_product, 3, 4, 5)
    torch.testing.assert_close(gelu_product(gate, up, bias), F.gelu(gate + bias, approximate="tanh") * up)


def test_both_forms_agree_to_the_bit() -> None:
    gate, up, bias = draw(gelu_product, 130, 33)
    grad = torch.randn(130, 33)
    y, grad_gate, grad_up, grad_bias = results(gelu_product, [gate, up, bias], grad, "triton")
    joined = [torch.cat([gate, up], -1), torch.cat([bias, torch.zeros(33)])]
    actual = results(gated_gelu, joined, grad, "triton")
    expected = [y, torch.cat([grad_gate, grad_up], -1), grad_bias]
    for value, truth in zip([*actual[:2], actual[2][:33]], expected, strict=True):
        assert torch.equal(value, truth)


@both_forms
def test_far_from_zero(op: Op) -> None:
    far = torch.tensor([[-1e4, 1e4, 1e15, -1e15]])
    inputs = [torch.cat([far, torch.full_like(far, 2)], -1)] if op is gated_gelu else [far, torch.full_like(far, 2)]
    for value in results(op, [*inputs, torch.zeros(inputs[0].shape[-1])], torch.ones(1, 4), "triton"):
        assert torch.isfinite(value).all()


@both_forms
@pytest.mark.parametrize("strided", [0, 1])
def test_strided_input(op: Op, strided: int) -> None:
    inputs, grad = draw(op, 3, 5, 10), torch.randn(5, 3, 10).transpose(0, 1)
    index = min(strided, len(inputs) - 2)  # joined, there is one tensor to stride
    value = inputs[index]
    inputs[index] = torch.cat([value, value], -1).repeat(2, 1, 1)[::2, :, value.shape[-1] :]
    inputs[-1] = torch.stack([inputs[-1], inputs[-1]], -1)[:, 0]
    assert not inputs[index].is_contiguous()
    for value, truth in zip(results(op, inputs, grad, "triton"), truths(op, inputs, grad), strict=True):
        assert relative_error(value, truth) < 1e-6


@both_forms
@both_backends
@pytest.mark.parametrize("tokens", [(0,), (2, 0)])
def test_no_tokens(op: Op, tokens: tuple[int, ...], backend: str) -> None:
    y, *of_activations, of_bias = results(op, draw(op, *tokens, 5), torch.zeros(*tokens, 5), backend)
    assert y.shape == (*tokens, 5)
    assert all(gradient.numel() == 0 for gradient in of_activations)
    assert not of_bias.any()


@both_forms
def test_launches_and_registration(op: Op) -> None:
    inputs = [value.requires_grad_() for value in draw(op, 9, 3)]
    with count_launches() as names:
        op(*inputs, backend="triton").sum().backward()
    assert names == ["gelu_kernel", "gelu_gradients_kernel", "column_sums_kernel"]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward, backward = {
        gated_gelu: (kernel._gelu, kernel._gelu_backward),
        gelu_product: (kernel._product, kernel._product_backward),
    }[op]
    torch.library.opcheck(forward, tuple(inputs), test_utils=tests)
    plain = [torch.randn(9, 3), *(value.detach() for value in inputs)]
    torch.library.opcheck(backward, tuple(plain), test_utils=("test_schema", "test_faketensor"))


@both_forms
@both_backends
def test_compiled_without_a_graph_break(op: Op, backend: str) -> None:
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for tokens in (6, 9):
        inputs, grad = draw(op, 2, tokens, 5), torch.randn(2, tokens, 5)
        expected = results(op, inputs, grad, backend)
        for value, truth in zip(results(compiled, inputs, grad, backend), expected, strict=True):
            assert relative_error(value, truth) < 1e-6


@both_forms
def test_other_derivatives(op: Op) -> None:
    """Forward mode is refused by name; a second derivative is the reference's, and an error on the kernels."""
    inputs = tuple(draw(op, 4, 3))
    for backend in ("reference", "triton"):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(lambda *a, b=backend: op(*a, backend=b), inputs, inputs)
    leaves = [value.double().requires_grad_() for value in inputs]
    assert torch.autograd.gradgradcheck(op, leaves)
    leaves = [value.requires_grad_() for value in inputs]
    (slope,) = torch.autograd.grad(op(*leaves, backend="triton").sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        slope.sum().backward()


ZEROS, LESS = torch.zeros(2, 4), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("op", "inputs", "error", "match"),
    [
        (gated_gelu, (ZEROS.long(), ZEROS[0]), TypeError, r"x\.dtype=torch\.int64: must be float32"),
        (gated_gelu, (torch.zeros(2, 5), torch.zeros(5)), ValueError, r"x\.shape=\(2, 5\): .* two halves"),
        (gated_gelu, (ZEROS, LESS[0]), ValueError, r"bias\.shape=\(3,\): must be \[4\]"),
        (gelu_product, (ZEROS.long(), ZEROS, ZEROS[0]), TypeError, r"gate\.dtype=torch\.int64: must be float32"),
        (gelu_product, (ZEROS, ZEROS.long(), ZEROS[0]), TypeError, r"up\.dtype=torch\.int64: must be float32"),
        (
            gelu_product,
            (ZEROS, ZEROS.half(), ZEROS[0]),
            TypeError,
            r"up\.dtype=torch\.float16: .* gate, torch\.float32",
        ),
        (gelu_product, (ZEROS[0, 0], ZEROS, ZEROS[0]), ValueError, r"gate\.shape=\(\): .* at least one channel"),
        (gelu_product, (ZEROS[:, :0], ZEROS[:, :0], ZEROS[0, :0]), ValueError, r"gate\.shape=\(2, 0\)"),
        (gelu_product, (ZEROS, LESS, ZEROS[0]), ValueError, r"up\.shape=\(2, 3\): must be \[2, 4\]"),
        (gelu_product, (ZEROS, ZEROS[:1], ZEROS[0]), ValueError, r"up\.shape=\(1, 4\): must be \[2, 4\]"),
        (gelu_product, (ZEROS, ZEROS, LESS[0]), ValueError, r"bias\.shape=\(3,\): must be \[4\]"),
        (gelu_product, (ZEROS, ZEROS.to("meta"), ZEROS[0]), ValueError, r"up\.device=meta: must be on cpu"),
        (gelu_product, (ZEROS, ZEROS, ZEROS[0].to("meta")), ValueError, r"bias\.device=meta: must be on cpu"),
    ],
)
def test_refusals(op: Op, inputs: tuple[Tensor, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        op(*inputs)


@both_forms
def test_unknown_backend(op: Op) -> None:
    with pytest.raises(ValueError, match="backend='cuda': must be one of"):
        op(*draw(op, 2, 3), backend="cuda")
