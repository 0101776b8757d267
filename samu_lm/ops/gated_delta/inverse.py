"""Inverses of batches of unit lower triangular matrices, for the chunks of the gated delta rule.

Diagonal blocks of 16 by substitution, then [[X, 0], [-Y L X, Y]] for each pair of neighbours: only products of true
inverses, whose entries stay small where powers of the matrix would not.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16


class UnitLowerInverse:
    """(I + strictly lower part of a)^-1 of ``[n, C, C]``, C a power of two of at least 16, call after call.

    Holds the memory of the substitution and views of it, which cost as much as its arithmetic.
    """

    def __init__(self, like: Tensor) -> None:
        n, self.size, _ = like.shape
        # Matrices along the last axis, where one operation covers them all.
        low, x = like.new_empty(2, BLOCK, BLOCK, self.size // BLOCK, n).unbind()
        self.low, self.x, self.identity = low, x, torch.eye(BLOCK, dtype=x.dtype, device=x.device)[..., None, None]
        self.steps = [(x[j + 1 :, : j + 1], low[j + 1 :, j, None], x[None, j, : j + 1]) for j in range(BLOCK - 1)]

    def _diagonal(self, a: Tensor) -> Tensor:
        blocks = self.size // BLOCK
        return a.view(-1, blocks, BLOCK, blocks, BLOCK).diagonal(dim1=1, dim2=3).permute(1, 2, 3, 0)

    def __call__(self, a: Tensor, out: Tensor) -> Tensor:
        """Writes the inverses to ``out``, which must be 0 above the diagonal."""
        self.low.copy_(self._diagonal(a))
        self.x.copy_(self.identity)
        for target, factor, row in self.steps:
            target.addcmul_(factor, row, value=-1)
        self._diagonal(out).copy_(self.x)
        width = BLOCK
        while width < self.size:
            for start in range(0, self.size, 2 * width):
                upper, lower = slice(start, start + width), slice(start + width, start + 2 * width)
                corner = torch.bmm(out[:, lower, lower], torch.bmm(a[:, lower, upper], out[:, upper, upper]))
                torch.neg(corner, out=out[:, lower, upper])
            width *= 2
        return out
