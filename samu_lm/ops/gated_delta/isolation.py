"""Documents kept apart where a value is infinite or NaN.

A matrix product adds up over all tokens of a chunk, those of other documents with weight 0; but 0 times infinity is
NaN. So a pass over rows of several documents whose results are not all finite is run again, several times over, each
time with a part of the documents and zeros in place of the others, their states included: no two documents of a part
share a chunk or its states. A document that is finite gets the same bits either way, since it only ever adds zeros.

Shapes: as in ``reference.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.gated_delta import passes
from samu_lm.ops.gated_delta.passes import Kept
from samu_lm.ops.gated_delta.rows import Inputs


def _all_finite(*tensors: Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)).double() for t in tensors]
    # A sum may overflow where no value has: only then is each of them looked at.
    return bool(torch.stack(sums).sum().isfinite()) or all(bool(t.isfinite().all()) for t in tensors)


class _Part:
    """The documents whose number leaves one remainder: selects their tokens and states."""

    def __init__(self, document: Tensor, size: int, parts: int, remainder: int) -> None:
        self.tokens = document[:, 1:] % parts == remainder  # [B, T]
        self.states = (document[:, :-1:size] % parts == remainder).T  # [N, B], before each chunk
        self.initial, self.final = self.states[0], document[:, -1] % parts == remainder

    def passing(self, heads: int) -> Tensor:
        """Whether the state at each chunk's edge is this part's, bool ``[N + 1, B H]``."""
        return torch.cat([self.states, self.final[None]]).repeat_interleave(heads, 1)

    def inputs(self, inputs: Inputs) -> Inputs:
        """The inputs with zeros in place of other documents."""
        q, k, v, log_alpha, beta = (torch.where(self._tokens_of(x), x, 0) for x in inputs[:5])
        state = inputs.initial_state
        if state is not None:
            state = torch.where(self.initial[:, None, None, None], state, 0)
        return Inputs(q, k, v, log_alpha, beta, inputs.first, state)

    def _tokens_of(self, x: Tensor) -> Tensor:
        return self.tokens.view(*self.tokens.shape, *[1] * (x.dim() - 2))

    def merge_tokens(self, mine: Tensor, others: Tensor) -> Tensor:
        """``[B, T, ...]``: mine at this part's tokens."""
        return torch.where(self._tokens_of(mine), mine, others)

    def merge_rows(self, select: Tensor, mine: Tensor, others: Tensor) -> Tensor:
        """``[B, ...]``: mine at the selected rows."""
        return torch.where(select.view(-1, *[1] * (mine.dim() - 1)), mine, others)

    def merge_kept(self, mine: Kept, others: Kept | None, size: int) -> Kept:
        """What is kept, mine at this part's states and tokens; zeros elsewhere where ``others`` is None."""
        count, n = mine.states.shape[:2]
        batch = self.tokens.shape[0]
        by_state = self.states.repeat_interleave(n // batch, 1)
        inner = passes.inner_chunk(size)
        if count < len(by_state):  # those between the caller's chunks are not kept
            by_state = by_state[:: size // inner][:count]
        padded = torch.nn.functional.pad(self.tokens, (0, len(self.states) * inner - self.tokens.shape[1]))
        by_token = padded.view(batch, -1, inner).transpose(0, 1).repeat_interleave(n // batch, 1)
        merged = []
        for index, value in enumerate(mine):
            other = torch.zeros((), dtype=value.dtype, device=value.device) if others is None else others[index]
            if value.shape[0] == 0:
                merged.append(value)
                continue
            select = by_state[..., None] if index == 0 else by_token.repeat(1, 1, value.shape[2] // inner)
            merged.append(torch.where(select[..., None], value, other))
        return Kept(*merged)


def _parts(inputs: Inputs, size: int) -> list[_Part]:
    assert inputs.first is not None
    # Number of each token's document, from the state before the row (0) on.
    document = torch.nn.functional.pad(inputs.first.cumsum(1), (1, 0))
    size = passes.inner_chunk(size)
    ends = torch.cat([document[:, size::size], document[:, -1:]], 1)
    starts = document[:, :-1:size]
    parts = int((ends[:, : starts.shape[1]] - starts).max()) + 1
    return [_Part(document, size, parts, remainder) for remainder in range(parts)]


def run_forward(inputs: Inputs, size: int, save: bool, fat: bool) -> tuple[Tensor, Tensor, Kept]:
    """As :func:`passes.run_forward`; nothing of one document reaches another."""
    o, final, kept = passes.run_forward(inputs, size, save, fat)
    if inputs.first is None or _all_finite(o, final):
        return o, final, kept
    for part in _parts(inputs, size):
        passing = part.passing(inputs.q.shape[2])
        mine, mine_final, mine_kept = passes.run_forward(part.inputs(inputs), size, save, fat, passing)
        o = part.merge_tokens(mine, o)
        final = part.merge_rows(part.final, mine_final, final)
        kept = part.merge_kept(mine_kept, kept, size)
    return o, final, kept


def run_backward(
    inputs: Inputs, size: int, kept: Kept, fat: bool, grad_o: Tensor, grad_final_state: Tensor
) -> tuple[Tensor, ...]:
    """As :func:`passes.run_backward`; nothing of one document reaches another."""
    grads = passes.run_backward(inputs, size, kept, fat, grad_o, grad_final_state)
    if inputs.first is None or _all_finite(*grads):
        return grads
    for part in _parts(inputs, size):
        mine = passes.run_backward(
            part.inputs(inputs),
            size,
            part.merge_kept(kept, None, size),
            fat,
            part.merge_tokens(grad_o, torch.zeros_like(grad_o)),
            part.merge_rows(part.final, grad_final_state, torch.zeros_like(grad_final_state)),
            part.passing(inputs.q.shape[2]),
        )
        tokens = [part.merge_tokens(new, old) for new, old in zip(mine[:5], grads[:5], strict=True)]
        grads = (*tokens, part.merge_rows(part.initial, mine[5], grads[5]))
    return grads
