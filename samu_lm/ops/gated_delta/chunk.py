"""The arithmetic of one group of chunks of the gated delta rule, forward and backward, in batched matrix products.

Inside a chunk of C tokens with the state S before it, with g the running sum of log_alpha since the later of the
chunk's and the document's first token, D_ti = exp(g_t - g_i) for i <= t in one document and 0 elsewhere:

    P = (Q K^T) * D,   A = strictly lower part of (K K^T) * D,   X = (I + beta A)^-1
    R = beta (V - exp(g) K S),   U = X R,   O = exp(g) Q S + P U,   S' = exp(g_C) S + (exp(g_C - g) K)^T U

where exp(g) of a token and exp(g_C - g) of a token are 0 when a document starts between the state and the token.
U holds what each token really writes (Yang et al., arXiv 2406.06484 and 2412.06464). Every exponent is <= 0.

Results are written to tensors that the caller reuses for every group: on the CPU new memory costs more than what is
computed into it. They are contiguous, since only then is a batched product one call below torch.

Shapes: n = chunks x rows x heads matrices side by side. All tensors are in the working dtype but g (float64, for the
sake of its differences).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.gated_delta.inverse import BLOCK, UnitLowerInverse


class Decay(NamedTuple):
    """What D is made of; ``[n, C]``."""

    g: Tensor  # float64
    document: Tensor | None  # documents begun in the chunk so far; None where no chunk has a boundary inside


class Gates(NamedTuple):
    """What the tokens of a group are multiplied by, ``[n, C, 1]``, and its decays."""

    beta: Tensor
    from_start: Tensor  # exp(g), 0 where the state before the chunk is not seen
    to_end: Tensor  # exp(g_C - g), 0 where the token is not seen by the state after the chunk
    through: Tensor  # beta exp(g)
    total: tuple[Tensor, ...]  # exp(g_C) of each chunk, 0 where the chunk drops the state before it
    decay: Decay


class Pairs(NamedTuple):
    """What relates the tokens of a chunk to each other; ``[n, C, C]`` each."""

    d: Tensor  # D
    p: Tensor  # P
    a: Tensor  # A, its diagonal and what is above not cleared
    inverse: Tensor  # X


@lru_cache
def _not_earlier(size: int, device: torch.device) -> Tensor:
    """``[blocks, C]``: tokens that are not before a block's first."""
    token = torch.arange(size, device=device)
    return token >= token[::BLOCK, None]


def decays(decay: Decay, out: Tensor) -> Tensor:
    """D. Only blocks on the diagonal take an exp per entry; between blocks one goes by way of the later's first token.

    Both factors have exponents <= 0, so neither overflows, and a product vanishes only where D itself does.
    """
    n, size = decay.g.shape
    blocks = size // BLOCK
    g = decay.g.view(n, blocks, BLOCK)
    within = (g[..., None] - g[..., None, :]).clamp_(max=0).to(out.dtype).exp_()
    document = None if decay.document is None else decay.document.view(n, blocks, BLOCK)
    if document is not None:
        within.masked_fill_(document[..., None] != document[..., None, :], 0)
    within.tril_()
    if blocks == 1:
        return out.copy_(within[:, 0])
    by_row = (g - g[..., :1]).to(out.dtype).exp_()
    by_column = (g[..., :1] - decay.g[:, None]).clamp_(max=0).to(out.dtype).exp_()
    by_column.masked_fill_(_not_earlier(size, out.device), 0)
    if document is not None and decay.document is not None:
        by_row.masked_fill_(document != document[..., :1], 0)
        by_column.masked_fill_(document[..., :1] != decay.document[:, None], 0)
    torch.mul(by_row[..., None], by_column[:, :, None], out=out.view(n, blocks, BLOCK, size))
    on_diagonal = out.view(n, blocks, BLOCK, blocks, BLOCK).diagonal(dim1=1, dim2=3)
    on_diagonal.copy_(within.permute(0, 2, 3, 1))
    return out


def relate(q: Tensor, k: Tensor, gates: Gates, invert: UnitLowerInverse, spare: Tensor, out: Pairs) -> Pairs:
    """All of :class:`Pairs`, from queries and keys ``[n, C, dk]``; ``spare`` ``[n, C, C]`` is overwritten."""
    decays(gates.decay, out.d)
    torch.bmm(q, k.mT, out=out.p).mul_(out.d)
    torch.bmm(k, k.mT, out=out.a).mul_(out.d)
    invert(torch.mul(out.a, gates.beta, out=spare), out.inverse)
    return out


class Grads(NamedTuple):
    """Gradients of a chunk, complete or on the way; ``[n, C, ...]``."""

    o: Tensor  # from the caller; multiplied by exp(g) once it is not needed as it is
    u: Tensor
    minus_r: Tensor  # minus R's, in the end V's
    q: Tensor
    k: Tensor
    qk: Tensor  # [n, C, C], of Q K^T
    kk: Tensor  # [n, C, C], of K K^T


Spare = tuple[Tensor, Tensor, Tensor]


def local_gradients(q: Tensor, gates: Gates, pairs: Pairs, u: Tensor, grads: Grads, of_state: Tensor) -> None:
    """What a chunk's own outputs ask of U, of P and of the state before it: P^T dO, dO U^T and (exp(g) Q)^T dO."""
    torch.bmm(pairs.p.mT, grads.o, out=grads.u)
    torch.bmm(grads.o, u.mT, out=grads.qk)
    torch.bmm(q.mT, grads.o.mul_(gates.from_start), out=of_state)


def _through_pairs(gates: Gates, pairs: Pairs, u: Tensor, grads: Grads, spare: Spare) -> tuple[Tensor, Tensor]:
    """Turns P's gradient into those of Q K^T and K K^T; returns what g and beta get through D and A."""
    torch.bmm(grads.minus_r, u.mT, out=grads.kk).diagonal(dim1=1, dim2=2).zero_()
    moved = torch.mul(grads.qk, pairs.p, out=spare[0])
    by_a = torch.mul(grads.kk, pairs.a, out=spare[1])
    grad_beta = by_a.sum(-1)
    moved.addcmul_(by_a, gates.beta)
    # The decays meet in differences of nearly equal sums; float64 keeps what is left of them.
    grad_g = moved.sum(-1, dtype=torch.float64).sub_(moved.sum(-2, dtype=torch.float64))
    grads.qk.mul_(pairs.d)
    grads.kk.mul_(pairs.d).mul_(gates.beta)
    return grad_g, grad_beta


def backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    gates: Gates,
    pairs: Pairs,
    u: Tensor,
    states: tuple[Tensor, Tensor],
    grads: Grads,
    spare: Spare,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a chunk's inputs: those of q, k and v in ``grads``, returned those of g (float64) and beta.

    The third result, ``[n]``, times the chunk's decay is what g's at its last token gets from the state before.

    Args:
        inputs: q, k, v.
        gates, pairs, u: as in the forward pass.
        states: the state before the chunk, and the gradient of the one after it.
        grads: as :func:`local_gradients` leaves them, with all of R's.
        spare: overwritten; two ``[n, C, C]`` and one ``[n, C, dk]``.
    """
    q, k, v = inputs
    state, grad_next = states
    from_start, to_end, beta = gates.from_start.squeeze(-1), gates.to_end.squeeze(-1), gates.beta.squeeze(-1)
    grad_g, grad_beta = _through_pairs(gates, pairs, u, grads, spare)
    # Through the state before the chunk: rows of O and of -R reach it, and the keys, in the same way.
    torch.bmm(grads.o, state.mT, out=grads.q)
    torch.bmm(grads.minus_r, state.mT, out=grads.k)
    by_key = torch.linalg.vecdot(grads.k, k).mul_(from_start)
    grad_g += torch.linalg.vecdot(grads.q, q).addcmul_(by_key, beta)
    grad_beta += by_key.sub_(torch.linalg.vecdot(grads.minus_r, v))
    grads.k.mul_(gates.through)
    # Within the chunk; K K^T is symmetric, so one product serves both of its keys.
    grads.q.baddbmm_(grads.qk, k)
    grads.k.baddbmm_(grads.qk.mT, q)
    grads.k.baddbmm_(torch.add(grads.kk, grads.kk.mT, out=spare[0]), k)
    # Through the state after the chunk.
    through_end = torch.bmm(u, grad_next.mT, out=spare[2])
    at_end = torch.linalg.vecdot(through_end, k).mul_(to_end).double()
    grads.k.addcmul_(through_end, gates.to_end)
    grad_g -= at_end
    grad_g[:, -1] += at_end.sum(-1)
    grads.minus_r.mul_(-gates.beta)
    return grad_g, grad_beta, torch.linalg.vecdot(state.flatten(1), grad_next.flatten(1))
