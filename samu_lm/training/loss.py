"""Cross entropy of next-token targets as a sum, so that it can be divided by the targets of a whole optimizer step.

Shapes: B rows, L tokens, N = B L, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from samu_lm.model.block import PIECE
from samu_lm.model.lm import padded_vocabulary
from samu_lm.ops.cross_entropy import IGNORED, cross_entropy

# Bytes of logits held at once. Above it they are made, used and thrown away a chunk at a time. 1 GiB is 16,777 tokens
# of a vocabulary of 32,000 in bfloat16: so few chunks that adding up the weight's gradient does not matter.
CHUNK_BYTES = 2**30
# ... but in no more chunks than this.
MOST_CHUNKS = 32


class LanguageModel(Protocol):
    """What the loss asks of a model."""

    @property
    def output_weight(self) -> Tensor: ...

    def hidden(self, input_ids: Tensor, reset: Tensor | None = None) -> tuple[Tensor, object]: ...


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
    backend = getattr(model, "backend", "auto")
    return summed_cross_entropy(hidden, targets, loss_mask, model.output_weight, backend=backend)


def compiled_nll(model: Any, **options: Any) -> Callable[..., Tensor]:
    """:func:`packed_nll` under torch.compile: model and loss as one graph, or by parts where activations are spared.

    A function is compiled and not the module, so that no saved name carries a prefix of the compiler's.

    Args:
        model: the language model that it will be called with.
        options: of ``torch.compile``.
    """
    if getattr(model, "activation_checkpointing", "none") == "none":
        return torch.compile(packed_nll, **options)
    model.compile_parts(**options)
    return packed_nll


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum and both gradients, a chunk of tokens at a time: a chunk's logits live only while it is worked on.

    The loss is a sum, so its gradients are known but for a factor when the logits are: three matrix products in all,
    where keeping the logits for the backward pass takes the memory and making them again a fourth product.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tokens: int, differentiate: bool, backend: str
    ) -> Tensor:
        vocabulary = len(weight)
        if padding := padded_vocabulary(vocabulary) - vocabulary:
            weight = F.pad(weight, (0, 0, 0, padding))
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if differentiate else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if differentiate else None
        for start in range(0, len(hidden), tokens):
            chunk = hidden[start : start + tokens]
            nats, slope = cross_entropy(
                chunk @ weight.T, labels[start : start + tokens], vocabulary=vocabulary, differentiate=differentiate,
                backend=backend,
            )  # fmt: skip
            total = total + nats
            if grad_hidden is not None and grad_weight is not None and slope is not None:
                grad_hidden[start : start + tokens] = slope @ weight
                grad_weight += slope.T @ chunk
        if grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight[:vocabulary])
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # The factor itself is not rounded; in float32 there is no more at once than a piece.
        scaled = torch.empty_like(grad_hidden)
        for piece, target in zip(grad_hidden.split(PIECE), scaled.split(PIECE), strict=True):
            target.copy_(piece.float() * grad)
        return (
            scaled,
            (grad_weight * grad).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )


def summed_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    loss_mask: Tensor,
    weight: Tensor,
    chunk_bytes: int = CHUNK_BYTES,
    backend: str = "auto",
) -> Tensor:
    """Sum over targets of the cross entropy, in nats.

    Tokens are independent of each other here, so that working through them in chunks changes nothing but the order of
    a sum.

    Args:
        hidden: ``[B, L, D]`` input of the output layer, any floating type; under autocast, its type is taken.
        targets: ``[B, L]`` int64.
        loss_mask: ``[B, L]`` bool, True where a target counts.
        weight: ``[V, D]`` of the output layer.
        chunk_bytes: most bytes of logits held at once, unless that made more than 32 chunks.
        backend: of the op that works on a chunk's logits.

    Returns:
        float32 scalar; 0 where no target counts.
    """
    flat = hidden.flatten(0, 1)
    kind = flat.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else flat.dtype
    labels = torch.where(loss_mask, targets, IGNORED).flatten()
    tokens = max(1, chunk_bytes // (padded_vocabulary(len(weight)) * dtype.itemsize), -(-len(flat) // MOST_CHUNKS))
    if len(flat) <= tokens and kind != "cuda":
        logits = F.linear(flat, weight).float()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    differentiate = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        return _ChunkedCrossEntropy.apply(flat.to(dtype), weight.to(dtype), labels, tokens, differentiate, backend)
