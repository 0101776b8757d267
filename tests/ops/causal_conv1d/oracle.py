"""The causal convolution as a float64 loop over tokens and taps, written from its definition alone."""

from __future__ import annotations

import torch
from torch import Tensor


def conv_loop(
    x: Tensor, weight: Tensor, bias: Tensor, reset: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y ``[B, L, W]`` and final state ``[B, K-1, W]``, float64; differentiable by autograd."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    batch, length, width = x.shape
    reach = weight.shape[1] - 1
    rows_y, rows_state = [], []
    for b in range(batch):
        zeros = [x.new_zeros(width)] * reach
        window = zeros if initial_state is None else list(initial_state[b].double().unbind(0))
        outputs = []
        for t in range(length):
            if reset is not None and bool(reset[b, t]):
                window = zeros
            seen = [*window, x[b, t]]
            outputs.append(bias + sum(weight[:, k] * tap for k, tap in enumerate(seen)))
            window = seen[1:]
        rows_y.append(torch.stack(outputs))
        rows_state.append(torch.stack(window) if reach else x.new_zeros(0, width))
    return torch.stack(rows_y), torch.stack(rows_state)
