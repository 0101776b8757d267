"""The gated delta rule as a float64 token loop, straight from its definition, and how its tests draw and compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samu_lm.ops import gated_delta_rule
from tests.ops.support import gradients, relative_error

NAMES = ("q", "k", "v", "log_alpha", "beta")


def delta_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and the final state, float64."""
    q, k, v, log_alpha, beta = (t.double() for t in (q, k, v, log_alpha, beta))
    batch, length, heads, dk = q.shape
    shape = (batch, heads, dk, v.shape[3])
    state = q.new_zeros(shape) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(length):
        if reset is not None:
            state = torch.where(reset[:, t, None, None, None], torch.zeros(()).double(), state)
        state = torch.exp(log_alpha[:, t, :, None, None]) * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + beta[:, t, :, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def draw(
    batch: int, length: int, heads: int, dk: int, dv: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Inputs as the mixer makes them: keys and queries of norm 1, beta in (0, 1)."""
    q, k = (torch.nn.functional.normalize(torch.randn(batch, length, heads, dk), dim=-1) for _ in range(2))
    inputs = {
        "q": q,
        "k": k,
        "v": torch.randn(batch, length, heads, dv),
        "log_alpha": -torch.rand(batch, length, heads) * 0.3,
        "beta": torch.rand(batch, length, heads),
    }
    return {name: value.to(dtype).requires_grad_() for name, value in inputs.items()}


def compare(
    inputs: dict[str, Tensor],
    reset: Tensor | None = None,
    state: Tensor | None = None,
    tolerance: float = 1e-6,
    **call: Any,
) -> None:
    """o, final state and every gradient of one implementation against the loop, each within ``tolerance``."""
    actual = gated_delta_rule(**inputs, reset=reset, initial_state=state, output_final_state=True, **call)
    expected = delta_loop(**inputs, reset=reset, initial_state=state)
    assert actual[1] is not None
    leaves = [*inputs.values(), *([] if state is None else [state])]
    cotangents = (torch.randn_like(expected[0]), torch.randn_like(expected[1]))
    pairs = [
        *zip(actual, expected, strict=True),
        *zip(gradients(actual, leaves, cotangents), gradients(expected, leaves, cotangents), strict=True),
    ]
    for name, (value, truth) in zip(("o", "final_state", *NAMES, "initial_state"), pairs, strict=False):
        error = relative_error(value, truth)
        assert error <= tolerance, f"{call} {tuple(inputs['q'].shape)}: {name} is off by {error:.2e}"
