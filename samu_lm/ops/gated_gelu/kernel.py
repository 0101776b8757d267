"""The gated GELU on the GPU: custom ops over the Triton kernels, for gate and up in one tensor or in two.

Shapes: y ``[N, F]``; in one tensor, x ``[N, 2F]`` and bias ``[2F]``; in two, gate and up ``[N, F]`` and bias ``[F]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.common.sums import sum_programs
from samu_lm.ops.gated_gelu.kernel_gelu import gelu_gradients_kernel, gelu_kernel

# Tokens of a program.
_TOKENS = 128
# Tokens worked on together, channels, warps; measured at 65,536 tokens of 4,608 channels. The backward pass is short of
# registers.
_FORWARD, _BACKWARD = (8, 256, 4), (2, 512, 4)


def _sizes(y: Tensor, joined: bool, shape: tuple[int, int, int]) -> tuple[int, dict[str, int]]:
    """Programs along the tokens, and the kernels' sizes; joined, gate and up are halves of one tensor's rows."""
    rows, columns, warps = shape
    tokens, width = y.shape
    block = min(columns, next_power_of_two(width))
    blocks = cdiv(width, block)
    even = tokens % _TOKENS == 0 and width % block == 0
    sizes = {"F": width, "JOINED": joined, "TOKENS": _TOKENS, "ROWS": rows, "BLOCK": block, "BLOCKS": blocks}
    return cdiv(tokens, _TOKENS), sizes | {"EVEN": even, "num_warps": warps}


def _run(gate: Tensor, up: Tensor, bias: Tensor, y: Tensor, joined: bool) -> None:
    """Writes y; joined, gate and up are both the tensor ``[N, 2F]`` that holds them."""
    programs, sizes = _sizes(y, joined, _FORWARD)
    launch(gelu_kernel, programs * sizes["BLOCKS"], gate, up, bias, y, y.shape[0], **sizes)


def _run_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor, bias: Tensor, grad_gate: Tensor, grad_up: Tensor, joined: bool
) -> Tensor:
    """Writes the gradients of gate and up, joined as they are; returns the bias's, in float32."""
    programs, sizes = _sizes(grad_y, joined, _BACKWARD)
    partials = torch.empty(programs, bias.shape[0], dtype=torch.float32, device=gate.device)
    given = (grad_y.contiguous(), gate, up, bias, grad_gate, grad_up, partials, grad_y.shape[0])
    launch(gelu_gradients_kernel, programs * sizes["BLOCKS"], *given, **sizes)
    return sum_programs(partials)


@torch.library.custom_op("samu_lm::gated_gelu_triton", mutates_args=())
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    _run(x, x, bias, y, joined=True)
    return y


@_gelu.register_fake
def _(x, bias):
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@torch.library.custom_op("samu_lm::gated_gelu_triton_backward", mutates_args=())
def _gelu_backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and, in float32, of the bias."""
    grad_x = torch.empty_like(x)
    return grad_x, _run_backward(grad_y, x, x, bias, grad_x, grad_x, joined=True)


@_gelu_backward.register_fake
def _(grad_y, x, bias):
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


@torch.library.custom_op("samu_lm::gelu_product_triton", mutates_args=())
def _product(gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    _run(gate, up, bias, y, joined=False)
    return y


@_product.register_fake
def _(gate, up, bias):
    return torch.empty_like(gate)


@torch.library.custom_op("samu_lm::gelu_product_triton_backward", mutates_args=())
def _product_backward(grad_y: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and, in float32, of the bias."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    return grad_gate, grad_up, _run_backward(grad_y, gate, up, bias, grad_gate, grad_up, joined=False)


@_product_backward.register_fake
def _(grad_y, gate, up, bias):
    return torch.empty_like(gate), torch.empty_like(up), gate.new_empty(gate.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = _gelu_backward(grad_y, x, bias)
    return grad_x, grad_bias.to(bias.dtype)


def _differentiate_product(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, bias = ctx.saved_tensors
    grad_gate, grad_up, grad_bias = _product_backward(grad_y, gate, up, bias)
    return grad_gate, grad_up, grad_bias.to(bias.dtype)


_gelu.register_autograd(_differentiate, setup_context=_save)
_product.register_autograd(_differentiate_product, setup_context=_save)


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """See :func:`samu_lm.ops.gated_gelu.gated_gelu`."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return _gelu(flat, bias.contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)


def gelu_product(gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    """See :func:`samu_lm.ops.gated_gelu.gelu_product`."""
    width = gate.shape[-1]
    flat = [half.reshape(-1, width).contiguous() for half in (gate, up)]
    return _product(*flat, bias.contiguous()).view(gate.shape)
