"""RG-LRU in plain PyTorch: the definition that the kernels are held to (Griffin, arXiv 2402.19427).

Shapes: x, gate logits, y ``[B, L, W]``; a_param ``[W]``; state ``[B, W]`` float32; first bool ``[B, L]``; H gate
blocks of w = W/H channels.

The forward op also returns its states as float32 ``[B, L, W]``, kept for the backward pass.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from samu_lm.ops.resets import dense_first_token_mask
from samu_lm.ops.scan import adjoint_scan, linear_scan, previous_states

DECAY_SCALE = 8.0
# d sqrt(z)/dz = 1/sqrt(max(4 z, this)): the derivative never exceeds 1000.
SQRT_GRADIENT_FLOOR = 1e-6


class _Gates(NamedTuple):
    """What a token's gates make of its input; all float32 ``[B, L, W]`` but ``decay`` ``[W]``."""

    i: Tensor
    r: Tensor
    decay: Tensor  # 8 softplus(a_param)
    a: Tensor
    z: Tensor  # 1 - a^2
    b: Tensor  # input multiplier


def _gates(input_gate_logits: Tensor, a_gate_logits: Tensor, a_param: Tensor, mask: Tensor) -> _Gates:
    i, r = input_gate_logits.float().sigmoid(), a_gate_logits.float().sigmoid()
    decay = (DECAY_SCALE * torch.nn.functional.softplus(a_param.double())).float()
    log_a = r * -decay
    z = -torch.expm1(2 * log_a)
    return _Gates(i, r, decay, log_a.exp(), z, z.sqrt().masked_fill(mask[..., None], 1))


@torch.library.custom_op("samu_lm::rglru_reference", mutates_args=())
def _forward(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],  # noqa: UP045 (the schema is inferred from this annotation)
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _ = x.shape
    mask = dense_first_token_mask(first, batch, length, x.device, fresh=initial_state is None)
    gates = _gates(input_gate_logits, a_gate_logits, a_param, mask)
    u = gates.b * (gates.i * x.float())
    h = linear_scan(gates.a, u, mask, None if initial_state is None else initial_state.float())
    return h.to(x.dtype, copy=True), h[:, -1].clone(), h


@_forward.register_fake
def _(x, input_gate_logits, a_gate_logits, a_param, first, initial_state):
    batch, _, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(batch, width, dtype=torch.float32), torch.empty_like(y, dtype=torch.float32)


@torch.library.custom_op("samu_lm::rglru_reference_backward", mutates_args=())
def _backward(
    grad_y: Tensor,
    grad_final_state: Tensor,
    h: Tensor,
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Optional[Tensor],  # noqa: UP045
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, _ = x.shape
    mask = dense_first_token_mask(first, batch, length, x.device, fresh=initial_state is None)
    i, r, decay, a, z, b = _gates(input_gate_logits, a_gate_logits, a_param, mask)
    x32 = x.float()
    g = adjoint_scan(a, grad_y.float(), mask, grad_final_state)
    state = None if initial_state is None else initial_state.float()
    grad_b = (g * i * x32).masked_fill_(mask[..., None], 0)
    grad_log_a = g * previous_states(h, mask, state) * a
    grad_log_a -= 2 * a * a * grad_b / (4 * z).clamp(min=SQRT_GRADIENT_FLOOR).sqrt()
    grad_gated = g * b
    grad_decay = -(grad_log_a * r).double().sum((0, 1))
    grad_a_param = DECAY_SCALE * grad_decay * a_param.double().sigmoid()
    return (
        (grad_gated * i).to(x.dtype),
        (grad_gated * x32 * i * (1 - i)).to(input_gate_logits.dtype),
        (grad_log_a * -decay * r * (1 - r)).to(a_gate_logits.dtype),
        grad_a_param.to(a_param.dtype),
        (g[:, 0] * a[:, 0]).masked_fill(mask[:, :1], 0),
    )


@_backward.register_fake
def _(grad_y, grad_final_state, h, x, input_gate_logits, a_gate_logits, a_param, first, initial_state):
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(input_gate_logits, memory_format=contiguous),
        torch.empty_like(a_gate_logits, memory_format=contiguous),
        torch.empty_like(a_param),
        torch.empty_like(grad_final_state),
    )


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[2])
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, grad_y, grad_final_state, _grad_h):
    *inputs, h = ctx.saved_tensors
    initial_state = inputs[5]
    *grads, grad_state = _backward(grad_y, grad_final_state, h, *inputs)
    return (*grads, None, None if initial_state is None else grad_state.to(initial_state.dtype))


_forward.register_autograd(_differentiate, setup_context=_save)


def rglru_scan(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gated recurrence; see :func:`samu_lm.ops.rglru`. Returns y and the final state."""
    y, final_state, _ = _forward(x, input_gate_logits, a_gate_logits, a_param, first, initial_state)
    return y, final_state


def block_diagonal_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x_block @ weight[h] + bias[h]`` for every block: x ``[..., H * w]``, weight ``[H, w, w]``, bias ``[H, w]``."""
    blocks, block_width, _ = weight.shape
    split = x.reshape(-1, blocks, block_width).transpose(0, 1)
    return torch.baddbmm(bias[:, None].to(x.dtype), split, weight.to(x.dtype)).transpose(0, 1).reshape(x.shape)
