"""Cross entropy and its gradient in plain PyTorch.

Shapes: logits ``[N, S]``, the first V of S counting; labels int64 ``[N]``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def cross_entropy(logits: Tensor, labels: Tensor, vocabulary: int, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """See :func:`samu_lm.ops.cross_entropy.cross_entropy`."""
    labels = labels[:, None]
    counts = labels != IGNORED
    place = torch.where(counts, labels, 0)  # any other label out of range is refused
    wide = logits[:, :vocabulary].float()
    norm = wide.logsumexp(1, keepdim=True)
    total = torch.where(counts, norm - wide.gather(1, place), 0).sum()
    if not differentiate:
        return total, None
    slope = (wide - norm).exp().scatter_add(1, place, wide.new_full((1, 1), -1.0).expand_as(norm))
    slope = torch.where(counts, slope, 0).to(logits.dtype)
    return total, F.pad(slope, (0, logits.shape[1] - vocabulary))
