"""Cross entropy and its gradient on the GPU: a custom op over one Triton kernel.

Shapes: logits ``[N, S]``, the first V of S counting; labels int64 ``[N]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.common.launch import launch, next_power_of_two
from samu_lm.ops.cross_entropy.kernel_loss import cross_entropy_kernel
from samu_lm.ops.cross_entropy.reference import IGNORED

# Logits of a token that are worked on together.
_BLOCK = 8192


@torch.library.custom_op("samu_lm::cross_entropy_triton", mutates_args=("logits",))
def _losses(logits: Tensor, labels: Tensor, vocabulary: int, differentiate: bool) -> Tensor:
    """Loss per token, float32 ``[N]``; with ``differentiate`` the logits become their gradient."""
    count, stride = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    launch(
        cross_entropy_kernel,
        count,
        logits,
        labels,
        losses,
        vocabulary,
        stride,
        IGNORED=IGNORED,
        GRADIENT=differentiate,
        PADDED=vocabulary < stride,
        BLOCK=min(_BLOCK, next_power_of_two(stride)),
        num_warps=8,
    )
    return losses


@_losses.register_fake
def _(logits, labels, vocabulary, differentiate):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def cross_entropy(logits: Tensor, labels: Tensor, vocabulary: int, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """See :func:`samu_lm.ops.cross_entropy.cross_entropy`."""
    logits = logits.contiguous()
    losses = _losses(logits, labels.contiguous(), vocabulary, differentiate)
    return losses.sum(), logits if differentiate else None
