"""Norms of gradients, whole or in shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def gradient_norms(module: nn.Module) -> dict[str, Tensor]:
    """Euclidean norm of each parameter's gradient, float32 scalars by the parameter's name; of whole gradients where
    they lie in shards over the ranks (all of which call this)."""
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    found: dict[str, Tensor] = {name: torch.zeros(()) for name, _ in named} or {"": torch.zeros(())}
    for cut in (False, True):
        some = [(name, gradient) for name, gradient in named if hasattr(gradient, "full_tensor") is cut]
        if not some:
            continue
        norms: list[Any] = list(torch._foreach_norm([gradient for _, gradient in some], dtype=torch.float32))
        found.update((name, norm.full_tensor() if cut else norm) for (name, _), norm in zip(some, norms, strict=True))
    return found
