"""The gated GELU on the GPU: a custom op over the Triton kernels.

Shapes: x ``[N, 2F]``; bias ``[2F]``; y ``[N, F]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.gated_gelu.kernel_gelu import bias_kernel, gelu_gradients_kernel, gelu_kernel

# Tokens of a program.
_TOKENS = 128
# Tokens worked on together, channels, warps; measured at 65,536 tokens of 4,608 channels. The backward pass is short of
# registers.
_FORWARD, _BACKWARD = (8, 256, 4), (2, 512, 4)


def _sizes(x: Tensor, shape: tuple[int, int, int]) -> tuple[int, dict[str, int]]:
    """Programs along the tokens, and the kernels' sizes."""
    rows, columns, warps = shape
    width = x.shape[-1] // 2
    block = min(columns, next_power_of_two(width))
    blocks = cdiv(width, block)
    even = x.shape[0] % _TOKENS == 0 and width % block == 0
    sizes = {"F": width, "TOKENS": _TOKENS, "ROWS": rows, "BLOCK": block, "BLOCKS": blocks, "EVEN": even}
    return cdiv(x.shape[0], _TOKENS), sizes | {"num_warps": warps}


@torch.library.custom_op("samu_lm::gated_gelu_triton", mutates_args=())
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    programs, sizes = _sizes(x, _FORWARD)
    launch(gelu_kernel, programs * sizes["BLOCKS"], x, bias, y, x.shape[0], **sizes)
    return y


@_gelu.register_fake
def _(x, bias):
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@torch.library.custom_op("samu_lm::gated_gelu_triton_backward", mutates_args=())
def _gelu_backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and, in float32, of the bias."""
    programs, sizes = _sizes(x, _BACKWARD)
    grad_x = torch.empty_like(x)
    partials = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    grad_bias = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    given = (grad_y.contiguous(), x, bias, grad_x, partials, x.shape[0])
    launch(gelu_gradients_kernel, programs * sizes["BLOCKS"], *given, **sizes)
    columns = 16
    launch(
        bias_kernel,
        cdiv(x.shape[1], columns),
        partials,
        grad_bias,
        programs,
        F2=x.shape[1],
        ROWS=min(256, max(16, next_power_of_two(programs))),
        BLOCK=columns,
        num_warps=4,
    )
    return grad_x, grad_bias


@_gelu_backward.register_fake
def _(grad_y, x, bias):
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = _gelu_backward(grad_y, x, bias)
    return grad_x, grad_bias.to(bias.dtype)


_gelu.register_autograd(_differentiate, setup_context=_save)


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """See :func:`samu_lm.ops.gated_gelu.gated_gelu`."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return _gelu(flat, bias.contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)
