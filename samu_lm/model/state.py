"""The recurrent state of a whole model as one object that can be saved, loaded and branched.

Shapes: B rows, W width of the recurrence; per block one convolution state ``[B, K-1, W]`` and one recurrence state
``[B, W]`` (float32); for the gated delta rule ``[B, K-1, 3 W]`` and ``[B, H, d, d]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelState:
    """What a model carries from one token to the next.

    Attributes:
        conv: one ``[B, K-1, W]`` per block, the convolution's last inputs, oldest first.
        recurrent: one float32 ``[B, W]`` per block (SAMU: real parts, then imaginary parts), or ``[B, H, d, d]``.
        tokens: int64 ``[B]``, tokens seen since the state was empty; where 0, the next token is a first token.
    """

    conv: tuple[Tensor, ...]
    recurrent: tuple[Tensor, ...]
    tokens: Tensor

    @property
    def batch_size(self) -> int:
        """Rows B."""
        return self.tokens.shape[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelState:
        """A state with ``function`` applied to every tensor."""
        return ModelState(
            tuple(function(t) for t in self.conv), tuple(function(t) for t in self.recurrent), function(self.tokens)
        )

    def clone(self) -> ModelState:
        """A copy that shares no memory: the branch point of two continuations."""
        return self.map(torch.clone)

    def detach(self) -> ModelState:
        """The same values without gradient history."""
        return self.map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> ModelState:
        """The state on another device."""
        return self.map(lambda t: t.to(device))

    def select(self, rows: Tensor) -> ModelState:
        """The state of chosen rows: int64 indices ``[N]``, repeats allowed (to branch one row N times)."""
        return self.map(lambda t: t.index_select(0, rows))

    def state_dict(self) -> dict[str, Any]:
        """A plain dictionary of tensors, loadable under ``torch.load(weights_only=True)``."""
        return {"conv": list(self.conv), "recurrent": list(self.recurrent), "tokens": self.tokens}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ModelState:
        """The inverse of :meth:`state_dict`.

        Raises:
            ValueError: a key is missing or unknown, or the lists differ in length.
        """
        expected = {"conv", "recurrent", "tokens"}
        if set(state) != expected:
            raise ValueError(f"state keys={sorted(state)}: must be exactly {sorted(expected)}")
        if len(state["conv"]) != len(state["recurrent"]):
            raise ValueError(
                f"state blocks={len(state['conv'])} convolution, {len(state['recurrent'])} recurrence: must be equal"
            )
        return cls(tuple(state["conv"]), tuple(state["recurrent"]), state["tokens"])
