"""RG-LRU as a float64 loop over tokens, written from SPEC section 3 alone: what every implementation is held to."""

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
    x, input_gate_logits, a_gate_logits, a_param = (
        t.double() for t in (x, input_gate_logits, a_gate_logits, a_param)
    )
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
