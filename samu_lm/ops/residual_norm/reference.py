"""The residual addition and its norm in plain PyTorch.

Shapes: x, branch ``[..., D]``; bias, scale ``[D]``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def residual_norm(
    x: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor, eps: float, uses: int
) -> tuple[Tensor, ...]:
    """See :func:`samu_lm.ops.residual_norm.residual_norm`."""
    wide = torch.promote_types(torch.promote_types(x.dtype, branch.dtype), torch.float32)
    total = x.to(wide) + branch.to(wide)
    stream = (total if bias is None else total + bias.to(wide)).to(x.dtype)
    value = stream.to(wide)
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    normed = (normed * (1 + scale.to(wide))).to(branch.dtype)
    return (stream, *[normed] * uses)
