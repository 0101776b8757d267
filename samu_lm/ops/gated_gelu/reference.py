"""The gated GELU in plain PyTorch.

Shapes: in one tensor, x ``[..., 2F]`` and bias ``[2F]``; in two, gate and up ``[..., F]`` and bias ``[F]``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """See :func:`samu_lm.ops.gated_gelu.gated_gelu`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x.to(wide) + bias.to(wide)).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def gelu_product(gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    """See :func:`samu_lm.ops.gated_gelu.gelu_product`."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.gelu(gate.to(wide) + bias.to(wide), approximate="tanh") * up.to(wide)).to(gate.dtype)
