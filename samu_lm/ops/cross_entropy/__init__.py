"""Cross entropy of logits that are thrown away: losses, and the gradient in the place of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.cross_entropy.reference import IGNORED


def cross_entropy(
    logits: Tensor, labels: Tensor, *, differentiate: bool, vocabulary: int | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Sum of the cross entropies of tokens, and its gradient by the logits.

    Args:
        logits: ``[N, V]``, float32, bfloat16 or float16; their memory may be used for the gradient.
        labels: int64 ``[N]``, below V; a token with label -100 counts nothing.
        differentiate: work the gradient out.
        vocabulary: V where the logits have a padding behind them, which counts nothing and gets the gradient 0.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``(total, slope)``: total in nats, a float32 scalar; slope of the logits' shape and dtype, softmax less the
        label's 1, or None.

    Raises:
        ValueError: there are fewer logits than ``vocabulary``.
        RuntimeError: a label is out of range (on a GPU, the total is NaN instead), or ``backend="triton"`` cannot run.
    """
    vocabulary = logits.shape[1] if vocabulary is None else vocabulary
    if not 1 <= vocabulary <= logits.shape[1]:
        raise ValueError(f"vocabulary={vocabulary}: must be between 1 and the {logits.shape[1]} logits of a token")
    backend = "reference" if logits.dtype == torch.float64 else backend  # whose gradient keeps the type
    if choose_backend("cross_entropy", backend, logits) == "triton":
        from samu_lm.ops.cross_entropy.kernel import cross_entropy as run
    else:
        from samu_lm.ops.cross_entropy.reference import cross_entropy as run
    return run(logits, labels, vocabulary, differentiate)


__all__ = ["IGNORED", "cross_entropy"]
