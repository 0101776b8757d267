"""The blocks' matrix products: a product without its bias, and weight gradients that keep the whole GPU busy.

Shapes: N tokens, K inputs, O outputs of a linear map.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samu_lm.model.layers import autocast_dtype, is_own

# A weight's gradient is one tile of outputs a processor, over all tokens: where the last round of tiles leaves most
# processors idle, it pays to sum over the tokens in parts. Tiles of cuBLAS and processors of an H100 or H200.
_TILES = ((128, 256), (256, 128), (192, 192), (128, 192), (192, 128))
_PROCESSORS = 132
_MOST_PARTS = 4
# Fewer tokens are not worth a part, and a split that fills a tenth more of the GPU or less is not worth the sum.
_FEWEST_TOKENS = 2048
_WORTHWHILE = 1.1


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear map may be worked out here: no other kind of product, and nobody listens to the module."""
    return is_own(linear, nn.Linear)


def bare_product(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A linear map's output without its bias, and the bias: for an op behind it that adds it on the way.

    A map that is not plain (float8's, an adapter's) adds its own, and None is left.
    """
    if not is_plain(linear):
        return cast(Tensor, linear(x)), None
    return product(x, linear.weight), linear.bias


def whole_product(linear: nn.Module, x: Tensor) -> Tensor:
    """A linear map's output."""
    return product(x, linear.weight, linear.bias) if is_plain(linear) else linear(x)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: int | None = None) -> Tensor:
    """x ``[..., K]`` times the transposed ``weight [O, K]``, plus ``bias [O]``, in autocast's type.

    Args:
        x, weight, bias: of floating types.
        parts: of the sum over tokens that is the weight's gradient; one on a CPU and what suits its shape on a GPU
            if not given. Must divide the tokens.
    """
    if parts is None:
        parts = gradient_parts(math.prod(x.shape[:-1]), *weight.shape) if x.is_cuda else 1
    if parts == 1 or not torch.is_grad_enabled() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    return _Product.apply(x, weight, bias, autocast_dtype(x), parts)


def gradient_parts(tokens: int, outputs: int, inputs: int) -> int:
    """In how many parts to sum a weight's gradient ``[outputs, inputs]`` over the tokens."""

    def busy(parts: int) -> float:
        """Share of the processors' time that goes into outputs, for the best tile."""
        shares = []
        for rows, columns in _TILES:
            tiles = parts * -(-outputs // rows) * -(-inputs // columns)
            rounds = -(-tiles // _PROCESSORS)
            shares.append(parts * outputs * inputs / (rounds * _PROCESSORS * rows * columns))
        return max(shares)

    best, share = 1, _WORTHWHILE * busy(1)
    for parts in range(2, _MOST_PARTS + 1):
        # The weight's shape first: under torch.compile, each question about tokens makes a guard on their number.
        if busy(parts) > share and tokens % parts == 0 and tokens // parts >= _FEWEST_TOKENS:
            best, share = parts, _WORTHWHILE * busy(parts)
    return best


class _Product(torch.autograd.Function):
    """A product whose weight's gradient is summed over ``parts`` runs of tokens, then over the parts in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, parts: int) -> Tensor:
        flat, narrow = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        ctx.save_for_backward(flat, narrow)
        ctx.shape, ctx.x_dtype, ctx.weight_dtype, ctx.parts = x.shape, x.dtype, weight.dtype, parts
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = flat @ narrow.T if bias is None else torch.addmm(bias.to(dtype), flat, narrow.T)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        of_x = (grad @ weight).view(ctx.shape).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(grad.dtype, torch.float32)
        by_part = grad.view(ctx.parts, -1, grad.shape[1]).transpose(1, 2)
        of_weight = torch.bmm(by_part, x.view(ctx.parts, -1, x.shape[1])).sum(0, dtype=wide)
        of_bias = None if ctx.bias_dtype is None else grad.sum(0, dtype=wide).to(ctx.bias_dtype)
        return of_x, of_weight.to(ctx.weight_dtype), of_bias, None, None
