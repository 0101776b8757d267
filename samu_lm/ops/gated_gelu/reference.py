"""The gated GELU in plain PyTorch.

Shapes: x ``[..., 2F]``; bias ``[2F]``.
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
