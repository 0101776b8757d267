"""The residual stream between two blocks, whose last addition waits for the norm behind it.

Shapes: B rows, L tokens, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from samu_lm.model.layers import RMSNorm, is_own
from samu_lm.ops.backend import choose_backend
from samu_lm.ops.residual_norm import residual_norm


class Stream(NamedTuple):
    """A residual stream ``x + branch + bias``.

    Attributes:
        x: ``[B, L, D]``.
        branch: ``[B, L, D]``, what a block adds to it; None if nothing waits.
        bias: ``[D]``, of the branch; None where the branch has it.
    """

    x: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor | Stream) -> Stream:
        """A stream to which nothing is to be added, unless x is a stream already."""
        return x if isinstance(x, Stream) else cls(x)

    def normed(self, norm: RMSNorm, backend: str, uses: int = 1) -> tuple[Tensor, ...]:
        """The stream and its norm, ``[B, L, D]`` each; the norm once for each of 1 or 2 uses."""
        if (
            self.branch is None
            or not is_own(norm, RMSNorm)
            or choose_backend("residual_norm", backend, self.x) != "triton"
        ):
            x = self.added()
            return (x, *[norm(x)] * uses)
        return residual_norm(self.x, self.branch, self.bias, norm.scale, eps=norm.eps, uses=uses, backend=backend)

    def added(self) -> Tensor:
        """The stream alone."""
        if self.branch is None:
            return self.x
        branch = self.branch if self.bias is None else self.branch + self.bias.to(self.branch.dtype)
        return self.x + branch
