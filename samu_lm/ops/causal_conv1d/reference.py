"""Causal depthwise convolution over time that never reaches across a first token, plain PyTorch.

Shapes: x, y ``[B, L, W]``; weight ``[W, K]``, ``weight[:, K-1]`` for the current token; bias ``[W]``; state
``[B, K-1, W]``, the last K-1 inputs of the running document, oldest first, zeros where it has had fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`samu_lm.ops.causal_conv1d`. Returns y and the final state, both in x's dtype."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    reach = taps - 1
    if initial_state is None:
        before = x.new_zeros(batch, reach, width)
    else:
        before = initial_state.to(x.dtype)
    padded = torch.cat([before, x], dim=1)
    kernel = weight.float()
    y = x.float() * kernel[:, reach] + bias.float()
    visible: Tensor | None = None
    for back in range(1, taps):
        tap = padded[:, reach - back : reach - back + length].float()
        if first is not None:
            # Token t sees t - back only if none of t - back + 1 .. t is a first token.
            shifted = torch.nn.functional.pad(first, (back - 1, 0))[:, :length]
            visible = ~shifted if visible is None else visible & ~shifted
            tap = torch.where(visible[..., None], tap, 0)
        y = y + tap * kernel[:, reach - back]
    return y.to(x.dtype), _final_state(padded, first, reach, length)


def _final_state(padded: Tensor, first: Tensor | None, reach: int, length: int) -> Tensor:
    """The last ``reach`` inputs, those before the last first token replaced by zeros."""
    state = padded[:, length:]
    if first is None or reach == 0:
        return state.clone()
    # Inputs of state slot j = token length - reach + j: kept if no first token comes after it.
    recent = torch.nn.functional.pad(first, (reach, 0))[:, length:]
    after = recent.flip(1).cumsum(1).flip(1) - recent.long()
    return torch.where((after == 0)[..., None], state, 0)
