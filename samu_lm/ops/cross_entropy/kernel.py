"""Cross entropy and its gradient on the GPU: a custom op over one Triton kernel.

Shapes: logits ``[N, S]``, the first V of S counting; labels int64 ``[N]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.common.launch import launch, next_power_of_two
from samu_lm.ops.cross_entropy.kernel_loss import cross_entropy_kernel
from samu_lm.ops.cross_entropy.reference import IGNORED

# Most logits of a token that a program keeps in registers from one read, and how many it reads at a time of more.
_WHOLE, _BLOCK = 32_768, 8192
# Logits of a thread.
_SHARE = 64


@torch.library.custom_op("samu_lm::cross_entropy_triton", mutates_args=("logits",))
def _losses(logits: Tensor, labels: Tensor, vocabulary: int, differentiate: bool) -> Tensor:
    """Loss per token, float32 ``[N]``; with ``differentiate`` the logits become their gradient."""
    count, stride = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    whole = stride <= _WHOLE
    block = next_power_of_two(stride) if whole else _BLOCK
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
        WHOLE=whole,
        BLOCK=block,
        num_warps=max(1, block // (32 * _SHARE)) if whole else 8,
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
