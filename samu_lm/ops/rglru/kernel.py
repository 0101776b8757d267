"""RG-LRU on the GPU: differentiable ops over the Triton kernels.

``rglru_mixer`` takes the gates' weights and keeps logits and gates in registers; ``rglru_scan`` takes logits. Both run
the same kernels (docs/kernels-rglru.md). Each op is traceable without a graph break, capturable in a CUDA graph, and
gives the same bits on every run.

Legend: B rows, L tokens, W width, H gate blocks of w = W/H channels.
"""

from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from samu_lm.ops.common.replay import is_plain
from samu_lm.ops.common.signature import signature_of
from samu_lm.ops.rglru.kernel_launch import Gates, Gradients, backward, forward, parameter_sizes
from samu_lm.ops.rglru.kernel_plan import (
    OPERANDS,
    WIDEST_BLOCK,
    Problem,
    fits,
    logits_tiling,
    mixer_tiling,
    problem_for,
)

# The schemas are inferred from the annotations, which must spell Optional out.
# ruff: noqa: UP045


# What decides the sizes of kept buffers, for compiled graphs.
SIGNATURE = signature_of(Path(__file__).parent)


def _problem(x: Tensor, w: int, first: bool, state: bool) -> Problem:
    return problem_for(tuple(x.shape), w, x.dtype, first, state, x.device.index)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _fake_forward(x: Tensor, tile_tokens: int, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width = x.shape
    tiles = (length + tile_tokens - 1) // tile_tokens if save else 0
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(batch, width, dtype=torch.float32),
        x.new_empty(tiles, batch, width, dtype=torch.float32),
    )


@torch.library.custom_op("samu_lm::rglru_mixer_triton", mutates_args=())
def _mixer(
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    save: bool,
    signature: str,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(x, input_gate_weight.shape[1], first is not None, initial_state is not None)
    gates = Gates(input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias)
    return forward(problem, x, gates, a_param, first, initial_state, save)


@_mixer.register_fake
def _(
    x, input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias, a_param, first, initial_state, save, signature,
):  # fmt: skip
    return _fake_forward(x, mixer_tiling(input_gate_weight.shape[1]).T, save)


@torch.library.custom_op("samu_lm::rglru_mixer_triton_backward", mutates_args=())
def _mixer_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],
    saved: Tensor,
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],
    has_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(x, input_gate_weight.shape[1], first is not None, has_state)
    gates = Gates(input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias)
    grads = backward(problem, x, gates, a_param, first, saved, grad_y, grad_final_state)
    return grads.x, grads.parameters, grads.initial_state


@_mixer_backward.register_fake
def _(
    grad_y, grad_final_state, saved, x, input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias, a_param,
    first, has_state,
):  # fmt: skip
    batch, _, width = x.shape
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(2 * input_gate_weight.numel() + 3 * width, dtype=torch.float32),
        x.new_empty(batch, width, dtype=torch.float32),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], saved: Tensor) -> None:
    *tensors, initial_state = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, saved)
    ctx.state_dtype = None if initial_state is None else initial_state.dtype


def _like(grad: Tensor, tensor: Tensor) -> Tensor:
    grad = grad.view(tensor.shape)
    return grad if grad.dtype == tensor.dtype else grad.to(tensor.dtype)


def _arrange(ctx: Any, grads: tuple[Tensor, Tensor, Tensor], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Gradients in the order of the op's inputs, from x's, the packed parameters' and the initial state's."""
    grad_x, packed, grad_state = grads
    _, wi, bi, wa, ba, a_param, _ = tensors
    parts = packed.split([wi.numel(), wa.numel(), bi.numel(), ba.numel(), a_param.numel()])
    in_order = (parts[0], parts[2], parts[1], parts[3], parts[4])
    parameters = [_like(part, tensor) for part, tensor in zip(in_order, (wi, bi, wa, ba, a_param), strict=True)]
    return grad_x, *parameters, None, None if ctx.state_dtype is None else grad_state.to(ctx.state_dtype)


def _save_mixer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    _keep(ctx, inputs[:8], output[2])


def _differentiate_mixer(ctx: Any, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Any) -> tuple[Any, ...]:
    *tensors, saved = ctx.saved_tensors
    grad_y = torch.zeros_like(tensors[0]) if grad_y is None else grad_y
    grads = _mixer_backward(grad_y, grad_final_state, saved, *tensors, ctx.state_dtype is not None)
    return *_arrange(ctx, grads, tensors), None, None


_mixer.register_autograd(_differentiate_mixer, setup_context=_save_mixer)


class _EagerMixer(torch.autograd.Function):
    """The same op for plain tensors outside any tracing, at a fraction of the dispatcher's host time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, wi, bi, wa, ba, a_param, first, state = inputs
        problem = _problem(x, wi.shape[1], first is not None, state is not None)
        y, final_state, saved = forward(problem, x, Gates(wi, bi, wa, ba), a_param, first, state, True)
        _keep(ctx, inputs, saved)
        ctx.problem = problem
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_final_state: Tensor | None) -> tuple[Any, ...]:
        *tensors, saved = ctx.saved_tensors
        x, wi, bi, wa, ba, a_param, first = tensors
        grad_y = torch.zeros_like(x) if grad_y is None else grad_y
        grads = backward(ctx.problem, x, Gates(wi, bi, wa, ba), a_param, first, saved, grad_y, grad_final_state)
        return _arrange(ctx, (grads.x, grads.parameters, grads.initial_state), tensors)


@torch.library.custom_op("samu_lm::rglru_scan_triton", mutates_args=())
def _scan(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    save: bool,
    signature: str,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(x, 0, first is not None, initial_state is not None)
    gates = Gates(input_gate_logits, None, a_gate_logits, None)
    return forward(problem, x, gates, a_param, first, initial_state, save)


@_scan.register_fake
def _(x, input_gate_logits, a_gate_logits, a_param, first, initial_state, save, signature):
    return _fake_forward(x, logits_tiling().T, save)


@torch.library.custom_op("samu_lm::rglru_scan_triton_backward", mutates_args=())
def _scan_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],
    saved: Tensor,
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],
    has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = _problem(x, 0, first is not None, has_state)
    gates = Gates(input_gate_logits, None, a_gate_logits, None)
    grads: Gradients = backward(problem, x, gates, a_param, first, saved, grad_y, grad_final_state)
    assert grads.input_logits is not None and grads.a_logits is not None
    grad_param = grads.parameters[sum(parameter_sizes(problem)[:-1]) :].clone()
    return grads.x, grads.input_logits, grads.a_logits, grad_param, grads.initial_state


@_scan_backward.register_fake
def _(grad_y, grad_final_state, saved, x, input_gate_logits, a_gate_logits, a_param, first, has_state):
    batch, _, width = x.shape
    one = torch.empty_like(x, memory_format=torch.contiguous_format)
    return (
        one,
        torch.empty_like(one),
        torch.empty_like(one),
        x.new_empty(width, dtype=torch.float32),
        x.new_empty(batch, width, dtype=torch.float32),
    )


def _save_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    _keep(ctx, inputs[:6], output[2])


def _differentiate_scan(ctx: Any, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Any) -> tuple[Any, ...]:
    *tensors, saved = ctx.saved_tensors
    x, li, la, a_param, _first = tensors
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_x, grad_li, grad_la, grad_param, grad_state = _scan_backward(
        grad_y, grad_final_state, saved, *tensors, ctx.state_dtype is not None
    )
    state = None if ctx.state_dtype is None else grad_state.to(ctx.state_dtype)
    return grad_x, _like(grad_li, li), _like(grad_la, la), _like(grad_param, a_param), None, state, None, None


_scan.register_autograd(_differentiate_scan, setup_context=_save_scan)


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

    Token 0 is a first token where no initial state is given, whatever ``first`` says.

    Raises:
        TypeError: x has a type that the kernels do not take.
    """
    _check_kernel_type(x)
    save = _wants_gradient(x, input_gate_logits, a_gate_logits, a_param, initial_state)
    y, final_state, _ = _scan(x, input_gate_logits, a_gate_logits, a_param, first, initial_state, save, SIGNATURE)
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
        TypeError: x has a type that the kernels do not take.
        ValueError: the gate blocks are wider than the kernels take (see :func:`fits`).
    """
    _check_kernel_type(x)
    w = input_gate_weight.shape[1]
    if not fits(w, x.dtype):
        raise ValueError(
            f"input_gate_weight.shape={tuple(input_gate_weight.shape)}: at most {WIDEST_BLOCK[x.dtype]} channels a "
            f"block for {x.dtype}; project the gates first and call rglru_scan"
        )
    inputs = (x, input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias, a_param, first, initial_state)
    save = _wants_gradient(*inputs)
    if is_plain(x):
        if save:
            return _EagerMixer.apply(*inputs)
        problem = _problem(x, w, first is not None, initial_state is not None)
        return forward(problem, x, Gates(*inputs[1:5]), a_param, first, initial_state, False)[:2]
    y, final_state, _ = _mixer(*inputs, save, SIGNATURE)
    return y, final_state
