"""RG-LRU on the GPU: differentiable ops over the Triton kernels.

``rglru_mixer`` takes the gates' weights and keeps logits and gates in registers; ``rglru_scan`` takes logits. Both run
the same kernels (docs/kernels-rglru.md). Legend: B rows, L tokens, W width, H gate blocks of w = W/H channels.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv
from samu_lm.ops.rglru.kernel_launch import OPERANDS, Call, backward, forward, row_major
from samu_lm.ops.rglru.kernel_plan import LOGITS_CHANNELS, WIDEST_BLOCK, fits, logits_tiling, mixer_tiling


def _mixer_call(x: Tensor, weight: Tensor, first: Tensor | None, has_state: bool) -> Call:
    blocks, w, _ = weight.shape
    return Call(row_major(x), mixer_tiling(w), blocks, False, first is not None, has_state)


def _scan_call(x: Tensor, first: Tensor | None, has_state: bool) -> Call:
    blocks = cdiv(x.shape[2], LOGITS_CHANNELS)
    return Call(row_major(x), logits_tiling(), blocks, True, first is not None, has_state)


def _dense(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _fake_forward(x: Tensor, tile_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width = x.shape
    tiles = (length + tile_tokens - 1) // tile_tokens
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((batch, width), dtype=torch.float32),
        x.new_empty((tiles, batch, width), dtype=torch.float32),
    )


@torch.library.custom_op("samu_lm::rglru_mixer_forward", mutates_args=())
def _mixer_forward(
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],  # noqa: UP045 (the schema is inferred from this annotation)
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _dense(input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias)
    a_param, first, initial_state = _dense(a_param, first, initial_state)
    call = _mixer_call(x, input_gate_weight, first, initial_state is not None)
    return forward(call, tuple(gates), a_param, first, initial_state)


@_mixer_forward.register_fake
def _(x, input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias, a_param, first, initial_state):
    return _fake_forward(x, mixer_tiling(input_gate_weight.shape[1]).T)


@torch.library.custom_op("samu_lm::rglru_mixer_backward", mutates_args=())
def _mixer_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],  # noqa: UP045
    saved: Tensor,
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],  # noqa: UP045
    has_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _dense(input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias)
    a_param, first, grad_final_state = _dense(a_param, first, grad_final_state)
    call = _mixer_call(x, input_gate_weight, first, has_state)
    return backward(call, tuple(gates), a_param, first, saved, grad_y, grad_final_state)[:3]


@_mixer_backward.register_fake
def _(
    grad_y, grad_final_state, saved, x, input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias, a_param,
    first, has_state,
):  # fmt: skip
    batch, _, width = x.shape
    count = 2 * input_gate_weight.numel() + 3 * width
    float32 = {"dtype": torch.float32}
    return (
        torch.empty_like(grad_y, memory_format=torch.contiguous_format),
        x.new_empty(count, **float32),
        x.new_empty((batch, width), **float32),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _incoming(ctx: Any, grad_y: Tensor | None) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """Saved inputs, states, and a gradient of y that exists."""
    *inputs, saved = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(inputs[0], memory_format=torch.contiguous_format)
    return tuple(inputs), saved, grad_y


def _differentiate_mixer(ctx: Any, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Any) -> tuple[Any, ...]:
    inputs, saved, grad_y = _incoming(ctx, grad_y)
    _, weight, *_, a_param, _, state = inputs
    grad_x, total, grad_state = _mixer_backward(grad_y, grad_final_state, saved, *inputs[:7], state is not None)
    sizes = [weight.numel(), weight.numel(), a_param.numel(), a_param.numel(), a_param.numel()]
    wi, wa, bi, ba, param = total.split(sizes)
    parameters = [
        grad.view(tensor.shape).to(tensor.dtype)
        for grad, tensor in zip((wi, bi, wa, ba, param), inputs[1:6], strict=True)
    ]
    return grad_x, *parameters, None, None if state is None else grad_state.to(state.dtype)


_mixer_forward.register_autograd(_differentiate_mixer, setup_context=_save)


@torch.library.custom_op("samu_lm::rglru_scan_forward", mutates_args=())
def _scan_forward(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],  # noqa: UP045
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    input_gate_logits, a_gate_logits = _dense(input_gate_logits, a_gate_logits)
    a_param, first, initial_state = _dense(a_param, first, initial_state)
    call = _scan_call(x, first, initial_state is not None)
    return forward(call, (input_gate_logits, None, a_gate_logits, None), a_param, first, initial_state)


@_scan_forward.register_fake
def _(x, input_gate_logits, a_gate_logits, a_param, first, initial_state):
    return _fake_forward(x, logits_tiling().T)


@torch.library.custom_op("samu_lm::rglru_scan_backward", mutates_args=())
def _scan_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],  # noqa: UP045
    saved: Tensor,
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],  # noqa: UP045
    has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    input_gate_logits, a_gate_logits = _dense(input_gate_logits, a_gate_logits)
    a_param, first, grad_final_state = _dense(a_param, first, grad_final_state)
    gates = (input_gate_logits, None, a_gate_logits, None)
    call = _scan_call(x, first, has_state)
    grad_x, total, grad_initial, grad_li, grad_la = backward(
        call, gates, a_param, first, saved, grad_y, grad_final_state
    )
    assert grad_li is not None and grad_la is not None
    return grad_x, grad_li, grad_la, total[2 * a_param.numel() :].clone(), grad_initial


@_scan_backward.register_fake
def _(grad_y, grad_final_state, saved, x, input_gate_logits, a_gate_logits, a_param, first, has_state):
    batch, _, width = x.shape
    one = torch.empty_like(grad_y, memory_format=torch.contiguous_format)
    float32 = {"dtype": torch.float32}
    return (
        one,
        torch.empty_like(one),
        torch.empty_like(one),
        x.new_empty(width, **float32),
        x.new_empty((batch, width), **float32),
    )


def _differentiate_scan(ctx: Any, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Any) -> tuple[Any, ...]:
    inputs, saved, grad_y = _incoming(ctx, grad_y)
    _, li, la, a_param, _, state = inputs
    grad_x, grad_li, grad_la, grad_param, grad_state = _scan_backward(
        grad_y, grad_final_state, saved, *inputs[:5], state is not None
    )
    return (
        grad_x,
        grad_li.to(li.dtype),
        grad_la.to(la.dtype),
        grad_param.to(a_param.dtype),
        None,
        None if state is None else grad_state.to(state.dtype),
    )


_scan_forward.register_autograd(_differentiate_scan, setup_context=_save)


def _check_kernel_type(x: Tensor) -> None:
    if x.dtype not in OPERANDS:
        raise TypeError(f"x.dtype={x.dtype}: the Triton kernels take float32, bfloat16 or float16")


def rglru_scan(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gated recurrence from logits; see :func:`samu_lm.ops.rglru`. Returns y and the final state.

    Without ``first`` only token 0 is a first token, and only where no initial state is given.
    """
    _check_kernel_type(x)
    y, final_state, _ = _scan_forward(x, input_gate_logits, a_gate_logits, a_param, first, initial_state)
    return y, final_state


def rglru_mixer(
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gate projections and recurrence in one; see :func:`samu_lm.ops.rglru_mixer`. Returns y and the final state.

    Raises:
        ValueError: the gate blocks are wider than the kernels take (see :func:`fits`).
    """
    _check_kernel_type(x)
    w = input_gate_weight.shape[1]
    if not fits(w, x.dtype):
        raise ValueError(
            f"input_gate_weight.shape={tuple(input_gate_weight.shape)}: at most {WIDEST_BLOCK[x.dtype]} channels a "
            f"block for {x.dtype}; project the gates first and call rglru_scan"
        )
    gates = (input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias)
    y, final_state, _ = _mixer_forward(x, *gates, a_param, first, initial_state)
    return y, final_state
