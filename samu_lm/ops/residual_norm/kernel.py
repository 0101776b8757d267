"""The residual addition and its norm on the GPU: custom ops over the Triton kernels.

Shapes: x, branch, stream, normed ``[N, D]``; bias, scale ``[D]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.common.sums import sum_programs
from samu_lm.ops.residual_norm.kernel_norm import residual_norm_gradients_kernel, residual_norm_kernel

# Channels of a thread; tokens of a program in the forward pass, and in the backward pass by the tokens at hand, which
# should leave several programs to each processor.
_SHARE = 32
_TOKENS = 2


def _tokens_backward(tokens: int) -> int:
    return 64 if tokens >= 32_768 else 16


def _sizes(x: Tensor, eps: float, tokens: int) -> tuple[int, dict[str, Any]]:
    """Programs, and the kernels' sizes."""
    block = next_power_of_two(x.shape[1])
    sizes = {"EPS": eps, "D": x.shape[1], "TOKENS": tokens, "BLOCK": block, "EVEN": x.shape[0] % tokens == 0}
    return cdiv(x.shape[0], tokens), sizes | {"num_warps": min(32, max(1, block // (32 * _SHARE)))}


@torch.library.custom_op("samu_lm::residual_norm_triton", mutates_args=())
def _norm(x: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream, normed = torch.empty_like(x), torch.empty_like(branch)
    programs, sizes = _sizes(x, eps, _TOKENS)
    given = scale if bias is None else bias
    launch(
        residual_norm_kernel, programs, x, branch, given, scale, stream, normed, x.shape[0], BIAS=bias is not None,
        **sizes,
    )  # fmt: skip
    return stream, normed


@_norm.register_fake
def _(x, branch, bias, scale, eps):
    return torch.empty_like(x), torch.empty_like(branch)


@torch.library.custom_op("samu_lm::residual_norm_triton_backward", mutates_args=())
def _norm_backward(
    grad_stream: Tensor | None, grad_normed: list[Tensor], stream: Tensor, scale: Tensor, eps: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the stream and, in float32, of scale and bias one behind the other."""
    programs, sizes = _sizes(stream, eps, _tokens_backward(stream.shape[0]))
    grad_x = torch.empty_like(stream)
    width = stream.shape[1] * (2 if bias else 1)
    partials = torch.empty(programs, width, dtype=torch.float32, device=stream.device)
    first, last = grad_normed[0].contiguous(), grad_normed[-1].contiguous()
    given = first if grad_stream is None else grad_stream.contiguous()
    launch(
        residual_norm_gradients_kernel, programs, given, first, last, stream, scale, grad_x, partials, stream.shape[0],
        BIAS=bias, GIVEN=grad_stream is not None, TWO=len(grad_normed) == 2, **sizes,
    )  # fmt: skip
    return grad_x, sum_programs(partials)


@_norm_backward.register_fake
def _(grad_stream, grad_normed, stream, scale, eps, bias):
    width = stream.shape[1] * (2 if bias else 1)
    return torch.empty_like(stream), stream.new_empty(width, dtype=torch.float32)


class _ResidualNorm(torch.autograd.Function):
    """The op and its gradients; the norm comes out once for each use, so that the gradients' sum is the kernel's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor, eps: float, uses: int
    ) -> tuple[Tensor, ...]:
        stream, normed = _norm(x, branch, bias, scale, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, scale)
        ctx.eps, ctx.branch_dtype, ctx.bias_dtype = eps, branch.dtype, None if bias is None else bias.dtype
        return (stream, normed) if uses == 1 else (stream, normed, normed.view_as(normed))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_stream: Tensor | None, *grad_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, scale = ctx.saved_tensors
        biased, given = ctx.bias_dtype is not None, [grad for grad in grad_normed if grad is not None]
        if not given:
            if grad_stream is None:
                return None, None, None, None, None, None
            of_bias = grad_stream.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if biased else None
            return grad_stream, grad_stream.to(ctx.branch_dtype), of_bias, None, None, None
        grad_x, sums = _norm_backward(grad_stream, given, stream, scale, ctx.eps, biased)
        width = stream.shape[1]
        of_bias = sums[width:].to(ctx.bias_dtype) if biased else None
        return grad_x, grad_x.to(ctx.branch_dtype), of_bias, sums[:width].to(scale.dtype), None, None


def residual_norm(
    x: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor, eps: float, uses: int
) -> tuple[Tensor, ...]:
    """See :func:`samu_lm.ops.residual_norm.residual_norm`."""
    flat = (-1, x.shape[-1])
    parameters = (None if bias is None else bias.contiguous(), scale.contiguous(), eps, uses)
    outputs = _ResidualNorm.apply(x.reshape(flat).contiguous(), branch.reshape(flat).contiguous(), *parameters)
    return tuple(out.view(x.shape) for out in outputs)
