"""The ops around the recurrence on a GPU, compiled: against their definitions in float64, and the same twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from samu_lm.model.products import gradient_parts, product
from samu_lm.ops.cross_entropy import IGNORED, cross_entropy
from samu_lm.ops.gated_gelu import gated_gelu, gelu_product
from samu_lm.ops.residual_norm import residual_norm
from tests.ops.support import relative_error

Op = Callable[..., Any]


def draw(*size: int) -> Tensor:
    return torch.randn(size, device="cuda")


def outcome(op: Op, tensors: list[Tensor], cotangents: list[Tensor], **settings: Any) -> list[Tensor]:
    """Outputs and the gradients of all inputs; NaNs where memory was left unwritten."""
    poison = [torch.full((2 * tensors[0].numel(),), float("nan"), device="cuda") for _ in range(3)]
    del poison
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = op(*leaves, **settings)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    chosen = [c.to(out.dtype) for c, out in zip(cotangents, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, chosen)]


def hold(op: Op, tensors: list[Tensor], cotangents: list[Tensor], bound: float, **settings: Any) -> None:
    results = outcome(op, tensors, cotangents, backend="triton", **settings)
    again = outcome(op, tensors, cotangents, backend="triton", **settings)
    truth = outcome(op, [t.double() for t in tensors], cotangents, backend="reference", **settings)
    for index, (value, second, true) in enumerate(zip(results, again, truth, strict=True)):
        assert torch.equal(value, second), index
        assert relative_error(value, true) < bound, index


TOKENS = [1, 63, 1024, 40_000]
DTYPES = [torch.float32, torch.bfloat16]


def bound(dtype: torch.dtype) -> float:
    return 5e-6 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [70, 1536, 2560, 5000])
@pytest.mark.parametrize("uses", [1, 2])
def test_residual_norm(tokens: int, width: int, uses: int, dtype: torch.dtype) -> None:
    tensors = [draw(tokens, width).to(dtype), draw(tokens, width).to(dtype), draw(width), draw(width) / 3]
    cotangents = [draw(tokens, width).to(dtype) for _ in range(1 + uses)]
    hold(residual_norm, tensors, cotangents, bound(dtype), uses=uses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [70, 2048])
def test_gated_gelu(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate, up, grad = (draw(tokens, width).to(dtype) for _ in range(3))
    hold(gelu_product, [gate, up, draw(width)], [grad], bound(dtype))
    hold(gated_gelu, [torch.cat([gate, up], 1), draw(2 * width)], [grad], bound(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [70, 32_000, 50_257, 128_256])
def test_cross_entropy(vocabulary: int, dtype: torch.dtype) -> None:
    logits, labels = 3 * draw(200, vocabulary).to(dtype), torch.randint(0, vocabulary, (200,), device="cuda")
    labels[::3] = IGNORED
    total, slope = cross_entropy(logits.clone(), labels, differentiate=True, backend="triton")
    wide = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    assert relative_error(total, truth.detach()) < 1e-5
    assert slope is not None
    assert relative_error(slope, torch.autograd.grad(truth, wide)[0]) < bound(dtype)
    padded = torch.nn.functional.pad(logits, (0, -vocabulary % 64), value=float("nan"))
    other, again = cross_entropy(padded, labels, vocabulary=vocabulary, differentiate=True, backend="triton")
    assert again is not None
    assert relative_error(other, truth.detach()) < 1e-5
    assert relative_error(again[:, :vocabulary], slope) < bound(dtype)
    assert not again[:, vocabulary:].any()


@pytest.mark.parametrize("biased", [True, False])
def test_a_product_whose_gradient_comes_in_parts(biased: bool) -> None:
    tokens, outputs, inputs = 8192, 1536, 4608
    assert gradient_parts(tokens, outputs, inputs) == 2
    tensors = [draw(tokens, inputs), draw(outputs, inputs) / 64, *([draw(outputs)] if biased else [])]
    grad = draw(tokens, outputs).bfloat16()

    def in_autocast(*given: Tensor, parts: int | None = None) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return product(*given, parts=parts)

    results, whole = (outcome(in_autocast, tensors, [grad], parts=parts) for parts in (None, 1))
    truth = outcome(product, [t.double() for t in tensors], [grad], parts=1)
    for value, other, true in zip(results, whole, truth, strict=True):
        assert value.dtype == other.dtype
        assert relative_error(value, true) < 1.2 * relative_error(other, true) + 1e-6
