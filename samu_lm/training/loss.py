"""Cross entropy of next-token targets as a sum, so that it can be divided by the targets of a whole optimizer step.

Shapes: B rows, L tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED_TARGET = -100
# Logits held at once, in elements: 1 GiB in float32. Above it they are made, used and thrown away a chunk at a time.
CHUNK_ELEMENTS = 2**28


class LanguageModel(Protocol):
    """What the loss asks of a model."""

    vocab_size: int

    def hidden(self, input_ids: Tensor, reset: Tensor | None = None) -> tuple[Tensor, object]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def packed_nll(model: LanguageModel, tokens: Tensor, targets: Tensor, reset: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum over a packed batch's targets of their negative log likelihood in nats, a float32 scalar.

    Args:
        model: the language model.
        tokens: ``[B, L]`` int64.
        targets: ``[B, L]`` int64, the token after each.
        reset: ``[B, L]`` bool, True at first tokens.
        loss_mask: ``[B, L]`` bool, True where a target counts.
    """
    hidden, _ = model.hidden(tokens, reset)
    return summed_cross_entropy(hidden, targets, loss_mask, model.logits, model.vocab_size)


def summed_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    loss_mask: Tensor,
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Sum over targets of the cross entropy, in nats.

    Tokens are independent of each other here, so that working through them in chunks, each with its logits recomputed
    in the backward pass, changes nothing but the order of a sum.

    Args:
        hidden: ``[B, L, D]`` input of the output layer.
        targets: ``[B, L]`` int64.
        loss_mask: ``[B, L]`` bool, True where a target counts.
        logits: the output layer, ``[n, D]`` to ``[n, V]`` in any floating type; the cross entropy is float32.
        vocab_size: V.
        chunk_elements: most logits (tokens times V) held at once.

    Returns:
        float32 scalar; 0 where no target counts.
    """
    flat = hidden.flatten(0, 1)
    labels = torch.where(loss_mask, targets, IGNORED_TARGET).flatten()

    def chunk_sum(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits(h).float(), y, ignore_index=IGNORED_TARGET, reduction="sum")

    tokens = max(1, chunk_elements // vocab_size)
    if len(flat) <= tokens:
        return chunk_sum(flat, labels)
    total = flat.new_zeros((), dtype=torch.float32)
    for h, y in zip(flat.split(tokens), labels.split(tokens), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(chunk_sum, h, y, use_reentrant=False, preserve_rng_state=False)
        else:
            total = total + chunk_sum(h, y)
    return total
