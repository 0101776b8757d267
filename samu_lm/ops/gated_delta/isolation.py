"""Documents kept apart where a value is infinite or NaN.

A matrix product adds up over all tokens of a chunk, those of other documents with weight 0; but 0 times infinity is
NaN. So a pass over rows of several documents whose results are not all finite is run again, several times over, each
time with a part of the documents and zeros in place of the others, their states included: no two documents of a part
share a chunk or its states. A document that is finite gets the same bits either way, since it only ever adds zeros.
Where a log_alpha of -inf drops the state of one head, a document begins for that head.

Shapes: as in ``reference.py``; N chunks, n = B H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.gated_delta import passes
from samu_lm.ops.gated_delta.passes import Kept
from samu_lm.ops.gated_delta.reference import drops
from samu_lm.ops.gated_delta.rows import Inputs


def _all_finite(*tensors: Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)).double() for t in tensors]
    # A sum may overflow where no value has: only then is each of them looked at.
    return bool(torch.stack(sums).sum().isfinite()) or all(bool(t.isfinite().all()) for t in tensors)


class _Part:
    """The documents whose number leaves one remainder: selects their tokens and states."""

    def __init__(self, document: Tensor, size: int, parts: int, remainder: int) -> None:
        self.tokens = document[:, 1:] % parts == remainder  # [B, T, H]
        self.states = (document[:, :-1:size] % parts == remainder).transpose(0, 1)  # [N, B, H], before each chunk
        self.initial, self.final = self.states[0], document[:, -1] % parts == remainder

    def passing(self) -> Tensor:
        """Whether the state at each chunk's edge is this part's, bool ``[N + 1, n]``."""
        return torch.cat([self.states, self.final[None]]).flatten(1)

    def inputs(self, inputs: Inputs) -> Inputs:
        """The inputs with zeros in place of other documents."""
        q, k, v, beta = (torch.where(self._tokens_of(x), x, 0) for x in (*inputs[:3], inputs.beta))
        kept = self.tokens | (inputs.log_alpha == -torch.inf)  # boundaries stay
        log_alpha = torch.where(kept, inputs.log_alpha, 0)
        state = inputs.initial_state
        if state is not None:
            state = torch.where(self.initial[..., None, None], state, 0)
        return Inputs(q, k, v, log_alpha, beta, inputs.first, state)

    def _tokens_of(self, x: Tensor) -> Tensor:
        return self.tokens if x.dim() == 3 else self.tokens[..., None]

    def merge_tokens(self, mine: Tensor, others: Tensor) -> Tensor:
        """``[B, T, ...]``: mine at this part's tokens."""
        return torch.where(self._tokens_of(mine), mine, others)

    def merge_states(self, select: Tensor, mine: Tensor, others: Tensor) -> Tensor:
        """``[B, H, dk, dv]``: mine where ``[B, H]`` selects them."""
        return torch.where(select[..., None, None], mine, others)

    def merge_kept(self, mine: Kept, others: Kept | None, size: int) -> Kept:
        """What is kept, mine at this part's states and tokens; zeros elsewhere where ``others`` is None."""
        count, by_state, inner = len(mine.states), self.states.flatten(1), passes.inner_chunk(size)
        if count < len(by_state):  # those between the caller's chunks are not kept
            by_state = by_state[:: size // inner][:count]
        padding = len(self.states) * inner - self.tokens.shape[1]
        padded = torch.nn.functional.pad(self.tokens, (0, 0, 0, padding))
        by_token = padded.unflatten(1, (-1, inner)).permute(1, 0, 3, 2).flatten(1, 2)  # [N, n, C]
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
    """The parts of all documents; one part where no row has a boundary."""
    # Number of each token's document, from the state before the row (0) on.
    document = torch.nn.functional.pad(drops(inputs.log_alpha, inputs.first).cumsum(1), (0, 0, 1, 0))
    size = passes.inner_chunk(size)
    ends = torch.cat([document[:, size::size], document[:, -1:]], 1)
    starts = document[:, :-1:size]
    parts = int((ends[:, : starts.shape[1]] - starts).max()) + 1
    return [_Part(document, size, parts, remainder) for remainder in range(parts)]


def run_forward(inputs: Inputs, size: int, save: bool, fat: bool) -> tuple[Tensor, Tensor, Kept]:
    """As :func:`passes.run_forward`; nothing of one document reaches another."""
    o, final, kept = passes.run_forward(inputs, size, save, fat)
    if _all_finite(o, final) or len(parts := _parts(inputs, size)) == 1:
        return o, final, kept
    for part in parts:
        mine, mine_final, mine_kept = passes.run_forward(part.inputs(inputs), size, save, fat, part.passing())
        o = part.merge_tokens(mine, o)
        final = part.merge_states(part.final, mine_final, final)
        kept = part.merge_kept(mine_kept, kept, size)
    return o, final, kept


def run_backward(
    inputs: Inputs, size: int, kept: Kept, fat: bool, grad_o: Tensor, grad_final_state: Tensor
) -> tuple[Tensor, ...]:
    """As :func:`passes.run_backward`; nothing of one document reaches another."""
    grads = passes.run_backward(inputs, size, kept, fat, grad_o, grad_final_state)
    if _all_finite(*grads) or len(parts := _parts(inputs, size)) == 1:
        return grads
    for part in parts:
        mine = passes.run_backward(
            part.inputs(inputs),
            size,
            part.merge_kept(kept, None, size),
            fat,
            part.merge_tokens(grad_o, torch.zeros_like(grad_o)),
            part.merge_states(part.final, grad_final_state, torch.zeros_like(grad_final_state)),
            part.passing(),
        )
        tokens = [part.merge_tokens(new, old) for new, old in zip(mine[:5], grads[:5], strict=True)]
        grads = (*tokens, part.merge_states(part.initial, mine[5], grads[5]))
    return grads
