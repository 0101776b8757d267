"""RG-LRU as a float64 loop over tokens, written from its definition alone: what every implementation is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class ClippedSqrt(torch.autograd.Function):
    """sqrt(z) whose derivative is 1 / sqrt(max(4 z, 1e-6))."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return grad / (4 * z).clamp(min=1e-6).sqrt()


def rglru_loop(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y ``[B, L, W]`` and final state ``[B, W]``, float64; differentiable by autograd."""
    x, input_gate_logits, a_gate_logits, a_param = (t.double() for t in (x, input_gate_logits, a_gate_logits, a_param))
    h = None if initial_state is None else initial_state.double()
    outputs = []
    for t in range(x.shape[1]):
        gated = input_gate_logits[:, t].sigmoid() * x[:, t]
        if h is None:
            h = gated
        else:
            log_a = -8 * a_gate_logits[:, t].sigmoid() * F.softplus(a_param)
            moved = log_a.exp() * h + ClippedSqrt.apply(-torch.expm1(2 * log_a)) * gated
            h = moved if reset is None else torch.where(reset[:, t, None], gated, moved)
        outputs.append(h)
    assert h is not None
    return torch.stack(outputs, 1), h


def block_diagonal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x_block @ weight[h] + bias[h]`` in float64."""
    blocks, w, _ = weight.shape
    split = x.double().view(*x.shape[:2], blocks, w)
    return (torch.einsum("blhk,hkn->blhn", split, weight.double()) + bias.double()).reshape(x.shape)


def rglru_mixer_loop(
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loop with its gates' projections, float64."""
    input_logits = block_diagonal(x, input_gate_weight, input_gate_bias)
    a_logits = block_diagonal(x, a_gate_weight, a_gate_bias)
    return rglru_loop(x, input_logits, a_logits, a_param, reset, initial_state)
