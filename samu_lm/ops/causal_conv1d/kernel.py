"""The causal depthwise convolution on the GPU: a custom op over the Triton kernels.

Shapes: x, y ``[B, L, W]``; weight ``[W, K]``; bias ``[W]``; first bool ``[B, L]``; state ``[B, K-1, W]``, oldest first.
``first`` None means: token 0 alone without an initial state, no token at all with one.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from samu_lm.ops.causal_conv1d.kernel_conv import conv_kernel
from samu_lm.ops.causal_conv1d.kernel_gradients import conv_gradients_kernel, conv_parameters_kernel
from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.common.replay import Replays, Slot, is_plain
from samu_lm.ops.common.sums import rows_at_once

_replays = Replays()
_STEP = 8
# Pieces of the backward pass on their way at a time, the one worked on included.
_STAGES = 3


def _sizes(x: Tensor, taps: int, block: int, chunk: int) -> dict[str, int]:
    _, length, width = x.shape
    block = min(block, max(32, next_power_of_two(width)))
    return {
        "W": width,
        "STRIDE_T": x.stride(1) if length > 1 else width,
        "TAPS": taps,
        "CHUNK": chunk,
        "STEP": _STEP,
        "BLOCK": block,
        "CHANNEL_BLOCKS": cdiv(width, block),
        "EVEN": width % block == 0,
        "num_warps": max(1, block // 128) if block < 256 else 1,
    }


def _chunk(x: Tensor, longest: int) -> int:
    """Tokens per program: as many as leave a few thousand programs."""
    tokens = x.shape[0] * x.shape[1] * max(1, x.shape[2] // 128)
    chunk = 16
    while chunk < longest and tokens // (2 * chunk) >= 4096:
        chunk *= 2
    return chunk


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, length, width = x.shape
    taps = weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state = torch.empty((batch, taps - 1, width), dtype=x.dtype, device=x.device)
    tensors = [x, *_dense(weight, bias, first, initial_state), y, final_state]
    chunk = _chunk(x, 64)

    def build(slots: list[Slot]) -> None:
        source, weights, biases, firsts, initial, out, final = slots
        sizes = _sizes(x, taps, 256, chunk)
        row_chunks = cdiv(length, chunk)
        launch(
            conv_kernel,
            batch * row_chunks * sizes["CHANNEL_BLOCKS"],
            source,
            weights,
            biases,
            firsts or source,
            initial or source,
            out,
            final,
            length,
            row_chunks,
            x.stride(0),
            HAS_FIRST=firsts is not None and taps > 1,
            HAS_INITIAL=initial is not None,
            TAIL=length % chunk != 0,
            **sizes,
        )

    _replays.run(("forward", x.shape, x.stride(), taps, first is None, initial_state is None), tensors, build)
    return y, final_state


def _backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x, gradients of weight and bias packed, grad of the initial state (empty if there was none)."""
    x, grad_y = x if x.stride(2) == 1 else x.contiguous(), grad_y.contiguous()
    batch, length, width = x.shape
    taps = weight.shape[1]
    chunk = _chunk(x, 256)
    row_chunks = cdiv(length, chunk)
    programs = batch * row_chunks
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = (batch, taps - 1, width) if initial_state is not None else (0, taps - 1, width)
    grad_initial = torch.empty(shape, dtype=torch.float32, device=x.device)
    packed = torch.empty((taps + 1) * width, dtype=torch.float32, device=x.device)
    partials = torch.empty(programs * (taps + 1) * width, dtype=torch.float32, device=x.device)

    def build(slots: list[Slot]) -> None:
        source, weights, firsts, initial, dy, final, dx, d_initial, out, scratch = slots
        sizes = _sizes(x, taps, 128, chunk)
        launch(
            conv_gradients_kernel,
            programs * sizes["CHANNEL_BLOCKS"],
            source,
            weights,
            firsts or source,
            initial or source,
            dy,
            final or dy,
            dx,
            d_initial if initial is not None else dx,
            scratch,
            length,
            row_chunks,
            x.stride(0),
            HAS_FIRST=firsts is not None and taps > 1,
            HAS_INITIAL=initial is not None,
            HAS_FINAL=final is not None,
            TAIL=length % chunk != 0,
            STAGES=_STAGES if final is None else 1,  # what the final state's gradient waits for is known too late
            **sizes,
        )
        launch(
            conv_parameters_kernel,
            cdiv((taps + 1) * width, 8),
            scratch,
            out,
            programs,
            W=width,
            TAPS=taps,
            ROWS=rows_at_once(programs),
            BLOCK=8,
            num_warps=4,
        )

    values = _dense(weight, first, initial_state)
    tensors = [x, *values, grad_y, *_dense(grad_final_state), grad_x, grad_initial, packed, partials]
    absent = (first is None, initial_state is None, grad_final_state is None)
    _replays.run(("backward", x.shape, x.stride(), taps, *absent), tensors, build)
    return grad_x, packed, grad_initial


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


@torch.library.custom_op("samu_lm::causal_conv1d_triton", mutates_args=())
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    first: Optional[Tensor],  # noqa: UP045 (the schema is inferred from this annotation)
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    return _forward(x, weight, bias, first, initial_state)


@_conv.register_fake
def _(x, weight, bias, first, initial_state):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])


@torch.library.custom_op("samu_lm::causal_conv1d_triton_backward", mutates_args=())
def _conv_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],  # noqa: UP045
    x: Tensor,
    weight: Tensor,
    first: Optional[Tensor],  # noqa: UP045
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad_y, grad_final_state, x, weight, first, initial_state)


@_conv_backward.register_fake
def _(grad_y, grad_final_state, x, weight, first, initial_state):
    width, taps = weight.shape
    batch = x.shape[0] if initial_state is not None else 0
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((taps + 1) * width, dtype=torch.float32),
        x.new_empty(batch, taps - 1, width, dtype=torch.float32),
    )


def _save(ctx, inputs, output):
    x, weight, bias, first, initial_state = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, first, initial_state)
    ctx.bias_dtype = bias.dtype


def _gradients(ctx, grad_y, grad_final_state, backward):
    x, weight, first, initial_state = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    grad_x, packed, grad_initial = backward(grad_y, grad_final_state, x, weight, first, initial_state)
    split = weight.numel()
    return (
        grad_x,
        packed[:split].view(weight.shape).to(weight.dtype),
        packed[split:].to(ctx.bias_dtype),
        None,
        None if initial_state is None else grad_initial.to(initial_state.dtype),
    )


def _differentiate(ctx, grad_y, grad_final_state):
    return _gradients(ctx, grad_y, grad_final_state, _conv_backward)


_conv.register_autograd(_differentiate, setup_context=_save)


class _EagerConv(torch.autograd.Function):
    """The same op for plain tensors outside any tracing, without the dispatcher's host time."""

    @staticmethod
    def forward(ctx, x, weight, bias, first, initial_state):
        _save(ctx, (x, weight, bias, first, initial_state), None)
        return _forward(x, weight, bias, first, initial_state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final_state):
        return _gradients(ctx, grad_y, grad_final_state, _backward)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`samu_lm.ops.causal_conv1d`. Returns y and the final state, both in x's dtype."""
    op = _EagerConv.apply if is_plain(x) else _conv
    return op(x, weight, bias, first, initial_state)
