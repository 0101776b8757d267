"""The residual addition and its norm: the kernels, in the interpreter on a CPU, and the reference, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.model.layers import RMSNorm
from samu_lm.ops.common.launch import count_launches
from samu_lm.ops.residual_norm import kernel, residual_norm
from tests.ops.support import relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [(1, 1), (7, 6), (3, 5, 34), (65, 16), (2, 600), (130, 8)]


def inputs(shape: tuple[int, ...], biased: bool = True) -> list[Tensor | None]:
    width = shape[-1]
    bias = torch.randn(width) if biased else None
    return [torch.randn(shape), 2 * torch.randn(shape), bias, torch.randn(width) / 3]


def converted(tensors: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def results(tensors: list[Tensor | None], grads: list[Tensor], backend: str, used: str = "both") -> list[Tensor]:
    """Both outputs, and the gradients of all inputs for a cotangent of one or both."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    outputs = residual_norm(*leaves, backend=backend)
    chosen = {"both": slice(0, 2), "stream": slice(0, 1), "normed": slice(1, 2)}[used]
    cotangents = [grad.to(out.dtype) for grad, out in zip(grads[chosen], outputs[chosen], strict=True)]
    inputs = [leaf for leaf in leaves if leaf is not None]
    found = torch.autograd.grad(outputs[chosen], inputs, cotangents, allow_unused=used == "stream")
    return [*outputs, *(torch.zeros(()) if grad is None else grad for grad in found)]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, ...], biased: bool, backend: str) -> None:
    tensors, grads = inputs(shape, biased), [torch.randn(shape), torch.randn(shape)]
    truth = results(converted(tensors, torch.float64), grads, "reference")
    for value, true in zip(results(tensors, grads, backend), truth, strict=True):
        assert value.dtype == torch.float32
        assert relative_error(value, true) < 2e-6


@pytest.mark.parametrize("used", ["stream", "normed"])
def test_one_output_used(used: str) -> None:
    tensors, grads = inputs((9, 12)), [torch.randn(9, 12), torch.randn(9, 12)]
    truth = results(converted(tensors, torch.float64), grads, "reference", used)
    for value, true in zip(results(tensors, grads, "triton", used), truth, strict=True):
        assert relative_error(value, true) < 2e-6 or not true.any()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_stream", [True, False])
def test_half_precision(narrow: torch.dtype, wide_stream: bool) -> None:
    x, branch, bias, scale = inputs((40, 34))
    assert x is not None
    assert branch is not None
    tensors = [x if wide_stream else x.to(narrow), branch.to(narrow), bias, scale]
    grads = [torch.randn(40, 34), torch.randn(40, 34).to(narrow).float()]
    if not wide_stream:
        grads[0] = grads[0].to(narrow).float()
    stream, normed, *found = results(tensors, grads, "triton")
    assert [t.dtype for t in (stream, normed)] == [tensors[0].dtype, narrow]
    assert [t.dtype for t in found] == [t.dtype for t in tensors]
    truth = results(converted(tensors, torch.float64), grads, "reference")
    for value, true in zip([stream, normed, *found], truth, strict=True):
        assert relative_error(value, true) < 2 * torch.finfo(narrow).eps


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_two_uses_of_the_norm(used: tuple[bool, bool], backend: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs((70, 12)) if tensor is not None]
    first, second, of_stream = torch.randn(3, 70, 12)

    def gradients(uses: int) -> list[Tensor]:
        stream, *normed = residual_norm(*tensors, uses=uses, backend=backend)
        total = (stream * of_stream).sum()
        for use, weight, counts in zip((normed[0], normed[-1]), (first, second), used, strict=True):
            total = total + (use * weight).sum() if counts else total
        return list(torch.autograd.grad(total, tensors))

    for value, truth in zip(gradients(2), gradients(1), strict=True):
        assert relative_error(value, truth) < 1e-6


def test_is_the_norm_module_of_the_stream() -> None:
    x, branch, bias, scale = inputs((3, 4, 10))
    norm = RMSNorm(10)
    norm.scale.data.copy_(scale)
    for backend in ("reference", "triton"):
        stream, normed = residual_norm(x, branch, bias, scale, eps=norm.eps, backend=backend)
        torch.testing.assert_close(stream, x + (branch + bias))
        torch.testing.assert_close(normed, norm(stream))


def test_strided_input_and_no_tokens() -> None:
    _, branch, bias, scale = inputs((6, 5, 12))
    wide = torch.randn(6, 10, 24)
    expected = residual_norm(wide[:, ::2, 12:], branch, bias, scale, backend="reference")
    for value, truth in zip(
        residual_norm(wide[:, ::2, 12:], branch, bias, scale, backend="triton"), expected, strict=True
    ):
        torch.testing.assert_close(value, truth)
    scale.requires_grad_()
    _, normed = residual_norm(torch.zeros(0, 12), torch.zeros(0, 12), bias, scale, backend="triton")
    normed.sum().backward()
    assert not scale.grad.any()


def test_zeros_are_finite() -> None:
    zeros = torch.zeros(3, 8)
    for value in results([zeros, zeros, torch.zeros(8), torch.zeros(8)], [torch.ones(3, 8)] * 2, "triton"):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("biased", [True, False])
def test_launches_registration_and_graph(biased: bool) -> None:
    tensors = [None if t is None else t.requires_grad_() for t in inputs((9, 6), biased)]
    with count_launches() as names:
        sum(out.sum() for out in residual_norm(*tensors, backend="triton")).backward()
    assert names == ["residual_norm_kernel", "residual_norm_gradients_kernel", "column_sums_kernel"]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernel._norm, (*tensors, 1e-6), test_utils=tests)

    def both(*given: Tensor | None) -> Tensor:
        stream, normed, again = residual_norm(*given, uses=2, backend="triton")
        return (stream * normed + again.square()).sum()

    leaves = [t for t in tensors if t is not None]
    eager = torch.autograd.grad(both(*tensors), leaves)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for value, truth in zip(torch.autograd.grad(compiled(*tensors), leaves), eager, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize(
    ("index", "value", "error", "match"),
    [
        (0, torch.zeros(2, 4, dtype=torch.int64), TypeError, "x.dtype"),
        (1, torch.zeros(2, 4, dtype=torch.int64), TypeError, "branch.dtype"),
        (0, torch.zeros(()), ValueError, "x.shape"),
        (1, torch.zeros(2, 3), ValueError, r"branch.shape=\(2, 3\)"),
        (1, torch.zeros(2, 4, device="meta"), ValueError, "branch.device"),
        (2, torch.zeros(3), ValueError, "bias.shape"),
        (3, torch.zeros(4, 1), ValueError, "scale.shape"),
    ],
)
def test_refusals(index: int, value: Tensor, error: type[Exception], match: str) -> None:
    tensors = [torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(4), torch.zeros(4)]
    tensors[index] = value
    with pytest.raises(error, match=match):
        residual_norm(*tensors)


def test_the_norm_has_one_use_or_two() -> None:
    with pytest.raises(ValueError, match="uses=3: must be 1 or 2"):
        residual_norm(torch.zeros(2, 4), torch.zeros(2, 4), None, torch.zeros(4), uses=3)
