"""``chunked`` and ``chunked_fat`` as differentiable ops over the passes of ``passes.py``.

``chunked`` keeps the state before every chunk for its backward pass and nothing else; ``chunked_fat`` also keeps the
states inside chunks, what relates their tokens and what these write.

Shapes: as in ``reference.py``; N chunks of C tokens, n = B H.
"""

# The schemas are inferred from the annotations, which must spell Optional out.
# ruff: noqa: UP045
from typing import Any, Optional

import torch
from torch import Tensor

from samu_lm.ops.gated_delta import isolation
from samu_lm.ops.gated_delta.passes import Kept, kept_shapes
from samu_lm.ops.gated_delta.reference import work_dtype
from samu_lm.ops.gated_delta.rows import Inputs, fitted_chunk

_INPUTS = 7


@torch.library.custom_op("samu_lm::gated_delta_chunked", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    size: int,
    save: bool,
    fat: bool,
) -> list[Tensor]:
    inputs = Inputs(q, k, v, log_alpha, beta, first, initial_state)
    with torch.autocast(q.device.type, enabled=False):  # products of float32 stay float32
        o, final_state, kept = isolation.run_forward(inputs, size, save, fat)
    return [o, final_state, *kept]


@_forward.register_fake
def _(q, k, v, log_alpha, beta, first, initial_state, size, save, fat):
    work = work_dtype(q)
    shapes = kept_shapes(Inputs(q, k, v, log_alpha, beta, first, initial_state), size, save, fat and save)
    return [
        torch.empty_like(v, memory_format=torch.contiguous_format),
        q.new_empty(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=work),
        *(q.new_empty(shape, dtype=work) for shape in shapes),
    ]


@torch.library.custom_op("samu_lm::gated_delta_chunked_backward", mutates_args=())
def _backward(
    grad_o: Tensor,
    grad_final_state: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    size: int,
    fat: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, log_alpha, beta, first, initial_state)
    with torch.autocast(q.device.type, enabled=False):
        gq, gk, gv, ga, gb, gs = isolation.run_backward(inputs, size, Kept(*kept), fat, grad_o, grad_final_state)
    return gq, gk, gv, ga, gb, gs


@_backward.register_fake
def _(grad_o, grad_final_state, kept, q, k, v, log_alpha, beta, first, initial_state, size, fat):
    inputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_alpha, beta)]
    return (*inputs, torch.empty_like(grad_final_state, dtype=work_dtype(q), memory_format=torch.contiguous_format))


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.size, _, ctx.fat = inputs
    kept = output[2:] if ctx.fat else output[2:3]
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # what is kept would get zeros of its size


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
    tensors, kept = saved[:_INPUTS], list(saved[_INPUTS:])
    kept += [kept[0].new_empty(0)] * (len(Kept._fields) - len(kept))
    v, state = tensors[2], tensors[-1]
    grad_o = torch.zeros_like(v) if grads[0] is None else grads[0]
    grad_final = grads[1]
    if grad_final is None:
        grad_final = kept[0].new_zeros(v.shape[0], v.shape[2], *kept[0].shape[2:])
    *of_inputs, of_state = _backward(grad_o, grad_final, kept, *tensors, ctx.size, ctx.fat)
    return *of_inputs, None, None if state is None else of_state.to(state.dtype), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    fat: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`samu_lm.ops.gated_delta_rule`. Returns o in v's dtype and the final state."""
    tensors = (q, k, v, log_alpha, beta, first, initial_state)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    o, final_state, *_ = _forward(*tensors, fitted_chunk(q.shape[1], chunk_size), save, fat)
    return o, final_state
