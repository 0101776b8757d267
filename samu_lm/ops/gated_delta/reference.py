"""The gated delta rule token by token in plain PyTorch: the definition.

    S_t = exp(log_alpha_t) S_{t-1} + beta_t k_t (v_t - exp(log_alpha_t) S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

Shapes: q, k ``[B, T, H, dk]``; v, o ``[B, T, H, dv]``; log_alpha, beta ``[B, T, H]``; first bool ``[B, T]``; state
``[B, H, dk, dv]``. Differentiated by autograd, which keeps several states per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Channels of a key that ``ssd`` takes at most.
WIDEST_KEY = 128


def work_dtype(q: Tensor) -> torch.dtype:
    """What states and sums are held in: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def drops(log_alpha: Tensor, first: Tensor | None) -> Tensor:
    """Where the state before a token is dropped: at first tokens and where log_alpha is -inf; bool ``[B, T, H]``."""
    dropped = log_alpha == -torch.inf
    return dropped if first is None else dropped | first[..., None]


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The token loop; returns o in v's dtype and the final state."""
    work = work_dtype(q)
    batch, length, heads, dk = q.shape
    dropped = drops(log_alpha, first)
    # Selected away, not multiplied by 0: what a dropped state holds, infinity included, is not seen again.
    alpha = log_alpha.to(work).masked_fill(dropped, 0).exp()[..., None, None]
    q, k, v = q.to(work)[..., None], k.to(work)[..., None], v.to(work)[..., None, :]
    beta = beta.to(work)[..., None, None]
    state = q.new_zeros(batch, heads, dk, v.shape[-1]) if initial_state is None else initial_state.to(work)
    # What is marked depends on data, which a traced call cannot ask for.
    traced = length == 1 or torch.compiler.is_compiling()
    marked = [True] * length if traced else dropped.any(2).any(0).tolist()
    outputs = []
    for t in range(length):
        if marked[t]:
            state = state.masked_fill(dropped[:, t, :, None, None], 0)
        state = alpha[:, t] * state
        update = beta[:, t] * (v[:, t] - k[:, t].mT @ state)
        state = state + k[:, t] * update
        outputs.append((q[:, t].mT @ state)[..., 0, :])
    return torch.stack(outputs, 1), state
