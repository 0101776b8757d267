"""The arithmetic of one group of chunks of the gated delta rule, forward and backward, in batched matrix products.

Inside a chunk of C tokens with the state S before it, with g the running sum of log_alpha since the later of the
chunk's and the document's first token, D_ti = exp(g_t - g_i) for i <= t in one document and 0 elsewhere:

    P = (Q K^T) * D,   A = strictly lower part of beta (K K^T) * D,   X = (I + A)^-1
    R = beta (V - exp(g) K S),   U = X R,   O = exp(g) Q S + P U,   S' = exp(g_C) S + (exp(g_C - g) K)^T U

where exp(g) of a token and exp(g_C - g) of a token are 0 when a document starts between the state and the token.
U holds what each token really writes (Yang et al., arXiv 2406.06484 and 2412.06464). Every exponent is <= 0.

Shapes: n = chunks x rows x heads matrices side by side; ``qk`` is ``[n, 2C, dk]``, queries above keys, so that one
product serves both. All tensors are in the working dtype but g (float64, for the sake of its differences).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_BASE = 8  # blocks of this size are inverted by substitution, larger ones by products of smaller inverses


class Decay(NamedTuple):
    """What log_alpha and the resets of a group come to; ``[n, C]`` each but ``total`` ``[n]``."""

    g: Tensor  # float64
    document: Tensor | None  # documents begun in the chunk so far; None where no chunk has a boundary inside
    from_start: Tensor  # exp(g), 0 where the state before the chunk is not seen
    to_end: Tensor  # exp(g_C - g), 0 where the token is not seen by the state after the chunk
    total: Tensor  # exp(g_C), 0 where the chunk drops the state before it


class Pairs(NamedTuple):
    """What relates the tokens of a chunk to each other."""

    d: Tensor  # [n, C, C], D
    pa: Tensor  # [n, 2C, C], P above (K K^T) * D
    inverse: Tensor  # [n, C, C], X


class Grads(NamedTuple):
    """Gradients of a group's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@lru_cache
def _causal(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 on and below the diagonal, -inf above: added to exponents."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)


def invert_unit_lower(a: Tensor) -> Tensor:
    """(I + strictly lower part of a)^-1 for ``[n, C, C]``, C a power of two of at least 8.

    Diagonal blocks of 8 by substitution, then [[X, 0], [-Y L X, Y]] for each pair of neighbours: only products of
    true inverses, whose entries stay small where powers of a would not.
    """
    n, size, _ = a.shape
    blocks = size // _BASE
    # Substitution with the matrices along the last axis, where one operation covers them all.
    packed = a.view(n, blocks, _BASE, blocks, _BASE).diagonal(dim1=1, dim2=3)
    low = packed.permute(1, 2, 3, 0).reshape(_BASE, _BASE, blocks * n)
    x = torch.zeros_like(low)
    x.diagonal().fill_(1)
    for j in range(_BASE - 1):
        x[j + 1 :, : j + 1].addcmul_(low[j + 1 :, j, None], x[None, j, : j + 1], value=-1)
    # [blocks, n, 8, 8]; blocks outermost, so that neighbours are slices.
    inverse = x.permute(2, 0, 1).reshape(blocks, n, _BASE, _BASE)
    width = _BASE
    while width < size:
        pairs = size // (2 * width)
        upper, lower = inverse[0::2].reshape(-1, width, width), inverse[1::2].reshape(-1, width, width)
        off = a.view(n, pairs, 2, width, pairs, 2, width)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)
        left = off.permute(3, 0, 1, 2).reshape(-1, width, width)
        joined = a.new_zeros(pairs * n, 2 * width, 2 * width)
        joined[:, :width, :width] = upper
        joined[:, width:, width:] = lower
        corner = torch.bmm(torch.bmm(lower, left), upper)
        torch.neg(corner, out=joined[:, width:, :width])
        inverse = joined.view(pairs, n, 2 * width, 2 * width)
        width *= 2
    return inverse[0]


def relate(qk: Tensor, beta: Tensor, decay: Decay) -> Pairs:
    """P, K K^T with its decays, and the inverse; from ``qk`` ``[n, 2C, dk]`` and beta ``[n, C]``."""
    n, double, _ = qk.shape
    size = double // 2
    d = qk.new_empty(n, size, size)
    torch.sub(decay.g[:, :, None], decay.g[:, None, :], out=d)
    d += _causal(size, d.dtype, d.device)
    if decay.document is not None:
        d.masked_fill_(decay.document[:, :, None] != decay.document[:, None, :], -torch.inf)
    d.exp_()
    pa = torch.bmm(qk, qk[:, size:].mT)
    pa.view(n, 2, size, size).mul_(d[:, None])
    return Pairs(d, pa, invert_unit_lower(pa[:, size:] * beta[..., None]))


class Solved(NamedTuple):
    """What a chunk's tokens write: U = u0 - w S for the state S before the chunk."""

    u0: Tensor  # [n, C, dv], X (beta V)
    w: Tensor  # [n, C, dk], X (beta exp(g) K)


def solve(qk: Tensor, v: Tensor, beta: Tensor, decay: Decay, inverse: Tensor) -> Solved:
    """Both parts of U in one product."""
    size, dv = v.shape[1:]
    right = qk.new_empty(v.shape[0], size, dv + qk.shape[2])
    torch.mul(v, beta[..., None], out=right[..., :dv])
    torch.mul(qk[:, size:], (beta * decay.from_start)[..., None], out=right[..., dv:])
    both = torch.bmm(inverse, right)
    return Solved(both[..., :dv], both[..., dv:])


def output(qk: Tensor, decay: Decay, pairs: Pairs, u: Tensor, state: Tensor) -> Tensor:
    """O ``[n, C, dv]``."""
    size = u.shape[1]
    o = torch.bmm(qk[:, :size], state).mul_(decay.from_start[..., None])
    return o.baddbmm_(pairs.pa[:, :size], u)


def local_gradients(qk: Tensor, decay: Decay, pairs: Pairs, grad_o: Tensor) -> tuple[Tensor, Tensor]:
    """What a chunk's own outputs ask of U, P^T dO, and of the state before it, (exp(g) Q)^T dO."""
    size = grad_o.shape[1]
    seen = qk[:, :size] * decay.from_start[..., None]
    return torch.bmm(pairs.pa[:, :size].mT, grad_o), torch.bmm(seen.mT, grad_o)


def backward(
    qk: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Decay,
    pairs: Pairs,
    u: Tensor,
    state: Tensor,
    grad_o: Tensor,
    grad_u: Tensor,
    grad_next: Tensor,
) -> Grads:
    """Gradients of a chunk's inputs, from all of U's, the outputs' and that of the state after it."""
    n, size, dv = u.shape
    k = qk[:, size:]
    # Rows of O above rows of -R: both reach D, the keys and the state before the chunk in the same way.
    both = qk.new_empty(n, 2 * size, dv)
    both[:, :size] = grad_o
    grad_r = torch.bmm(pairs.inverse.mT, grad_u)
    torch.neg(grad_r, out=both[:, size:])
    grad_pa = torch.bmm(both, u.mT)
    grad_pa[:, size:].diagonal(dim1=1, dim2=2).zero_()
    weighted = (grad_pa * pairs.pa).view(n, 2, size, size)
    grad_beta = torch.linalg.vecdot(grad_r, v) + weighted[:, 1].sum(-1)
    # The decays meet in differences of nearly equal sums; float64 keeps what is left of them.
    moved = torch.addcmul(weighted[:, 0], weighted[:, 1], beta[..., None])
    grad_g = moved.sum(-1, dtype=torch.float64) - moved.sum(-2, dtype=torch.float64)
    grad_pa.view(n, 2, size, size).mul_(pairs.d[:, None])
    grad_pa[:, size:].mul_(beta[..., None])
    grad_qk = torch.bmm(both, state.mT)
    grad_qk.view(n, 2, size, -1).mul_(decay.from_start[:, None, :, None])
    by_query, by_key = torch.linalg.vecdot(grad_qk, qk).view(n, 2, size).unbind(1)
    grad_beta += by_key
    grad_g += by_query.double() + (beta * by_key).double()
    grad_k = grad_qk[:, size:].mul_(beta[..., None])
    grad_qk.baddbmm_(grad_pa, k)
    grad_k += torch.bmm(grad_pa.mT, qk)
    through_end = torch.bmm(u, grad_next.mT).mul_(decay.to_end[..., None])
    at_end = torch.linalg.vecdot(through_end, k).double()
    grad_k += through_end
    grad_g -= at_end
    kept = decay.total * torch.linalg.vecdot(state.flatten(1), grad_next.flatten(1))
    grad_g[:, -1] += at_end.sum(-1) + kept
    return Grads(grad_qk[:, :size], grad_k, grad_r.mul_(beta[..., None]), grad_g, grad_beta)
