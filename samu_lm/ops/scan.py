"""Chunked scan of a diagonal linear recurrence in plain PyTorch.

    h_t = a_t * h_{t-1} + u_t,    h_t = u_t at a first token

Shapes: a, u, h ``[B, L, W]``, real or complex; first bool ``[B, L]``; carries ``[B, W]``.

Tokens inside a chunk run in order, all chunks side by side; the carries then pass from chunk to chunk, and a second
pass over the tokens starts each chunk from its carry. Only products of transitions with states are formed, never a
quotient or a logarithm, so the scan is as stable as the token loop. At a first token the old state is selected away
rather than multiplied by 0: an infinity or NaN in one document cannot reach the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Enough elements per step that a step costs more than the call that starts it.
_ELEMENTS_PER_STEP = 32768


def _chunk_count(batch: int, length: int, width: int) -> int:
    """Chunks per row: as many as fill a step, at most the square root of the length (equal work in and across)."""
    return max(1, min(_ELEMENTS_PER_STEP // max(1, batch * width), int(length**0.5)))


def _step(a: Tensor, u: Tensor, h: Tensor, first: Tensor | None, out: Tensor) -> Tensor:
    torch.addcmul(u, a, h, out=out)
    if first is not None:
        torch.where(first, u, out, out=out)
    return out


def _run(a: Tensor, u: Tensor, h: Tensor, first: Tensor | None, marked: list[bool], out: Tensor) -> Tensor:
    """Steps through dimension -2 of ``[..., T, W]`` from the carry ``h``; every state goes to ``out``."""
    for t in range(a.shape[-2]):
        at_first = first[..., t, None] if first is not None and marked[t] else None
        h = _step(a[..., t, :], u[..., t, :], h, at_first, out[..., t, :])
    return h


def _summaries(a: Tensor, u: Tensor, first: Tensor, marked: list[bool]) -> tuple[Tensor, Tensor]:
    """Product of transitions and last state from a zero carry, per chunk of ``[B, N, C, W]``."""
    last, product = u[..., 0, :].clone(), a[..., 0, :].clone()
    if marked[0]:
        product.masked_fill_(first[..., 0, None], 0)
    for t in range(1, a.shape[-2]):
        at_first = first[..., t, None] if marked[t] else None
        last = _step(a[..., t, :], u[..., t, :], last, at_first, torch.empty_like(last))
        product *= a[..., t, :]
        if at_first is not None:
            product.masked_fill_(at_first, 0)
    return product, last


def linear_scan(a: Tensor, u: Tensor, first: Tensor, initial_state: Tensor | None) -> Tensor:
    """All states of the recurrence above.

    Args:
        a: transitions ``[B, L, W]``, float32 or complex64; read nowhere at a first token.
        u: inputs, like ``a``.
        first: bool ``[B, L]``. Without an initial state, token 0 must be marked.
        initial_state: ``[B, W]`` of a's dtype, or None.

    Returns:
        h ``[B, L, W]`` of a's dtype.
    """
    batch, length, width = u.shape
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    if u.numel() == 0:
        return h
    carry = u.new_zeros(batch, width) if initial_state is None else initial_state
    chunks = _chunk_count(batch, length, width)
    size = length // chunks
    body = chunks * size
    if chunks > 1:
        view = (batch, chunks, size)
        a_body, u_body = a[:, :body].reshape(*view, width), u[:, :body].reshape(*view, width)
        first_body = first[:, :body].reshape(view)
        marked = first_body.any(dim=0).any(dim=0).tolist()
        product, last = _summaries(a_body[:, :-1], u_body[:, :-1], first_body[:, :-1], marked)
        broken = first_body.any(dim=2)
        carries = u.new_empty(batch, chunks, width)
        carries[:, 0] = carry
        for n in range(chunks - 1):
            _step(product[:, n], last[:, n], carries[:, n], None, carries[:, n + 1])
            torch.where(broken[:, n, None], last[:, n], carries[:, n + 1], out=carries[:, n + 1])
        ends = _run(a_body, u_body, carries, first_body, marked, h[:, :body].view(*view, width))
        carry = ends[:, -1]
    else:
        body = 0
    if body < length:
        marked = first[:, body:].any(dim=0).tolist()
        _run(a[:, body:], u[:, body:], carry, first[:, body:], marked, h[:, body:])
    return h


def adjoint_scan(a: Tensor, grad_h: Tensor, first: Tensor, grad_final_state: Tensor | None) -> Tensor:
    """Gradient of a loss with respect to every state, given its direct part: the scan run backwards in time.

    g_t = grad_h_t + conj(a_{t+1}) * g_{t+1}, cut where t+1 is a first token; ``grad_final_state`` adds to the last.

    Args and result: shaped as in :func:`linear_scan`.
    """
    length = grad_h.shape[1]
    if grad_h.numel() == 0:
        return grad_h.clone()
    # In reversed time, step s uses the transition out of token t = L-1-s, which token t+1 owns.
    reversed_a = torch.empty_like(a)
    reversed_a[:, 0] = 0
    reversed_a[:, 1:] = a[:, 1:].flip(1)
    if reversed_a.is_complex():
        reversed_a = reversed_a.conj().resolve_conj()
    cut = torch.zeros_like(first)
    cut[:, 1:] = first[:, 1:].flip(1)
    reversed_grad = grad_h.flip(1)
    if grad_final_state is not None:
        reversed_grad[:, 0] += grad_final_state
    cut[:, 0] = True
    return linear_scan(reversed_a, reversed_grad, cut, None).flip(1) if length > 1 else reversed_grad


def previous_states(h: Tensor, first: Tensor, initial_state: Tensor | None) -> Tensor:
    """h_{t-1} for every token; 0 where the token is a first token, so that nothing before it has a gradient."""
    before = torch.empty_like(h)
    if h.shape[1] == 0:
        return before
    before[:, 1:] = h[:, :-1]
    before[:, 0] = 0 if initial_state is None else initial_state
    return before.masked_fill_(first[..., None], 0)
