"""Cross entropy and its gradient in plain PyTorch.

Shapes: logits ``[N, V]``; labels int64 ``[N]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100


def cross_entropy(logits: Tensor, labels: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """See :func:`samu_lm.ops.cross_entropy.cross_entropy`."""
    labels = labels[:, None]
    counts = labels != IGNORED
    place = torch.where(counts, labels, 0)  # any other label out of range is refused
    wide = logits.float()
    norm = wide.logsumexp(1, keepdim=True)
    total = torch.where(counts, norm - wide.gather(1, place), 0).sum()
    if not differentiate:
        return total, None
    slope = (wide - norm).exp().scatter_add(1, place, wide.new_full((1, 1), -1.0).expand_as(norm))
    return total, torch.where(counts, slope, 0).to(logits.dtype)
