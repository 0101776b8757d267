"""Documents with infinite or NaN inputs, kept out of the kernels of ``ssd``.

The kernels' products add up over all tokens of a chunk, those of other documents with weight 0; but 0 times infinity is
NaN. So where rows hold several documents, tokens that are not finite go in as zeros, and what depends on them comes out
as NaN: outputs from the first such token of its document on, and every gradient of the document. Nothing here waits for
the device. A document whose finite inputs overflow inside a kernel is not caught: the rest of its row may be NaN then.

Shapes: as in ``reference.py``; per-head masks are bool ``[B, T, H]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samu_lm.ops.gated_delta.reference import drops
from samu_lm.ops.gated_delta.rows import Inputs


def not_finite(*tensors: Tensor) -> Tensor:
    """Tokens of which any tensor ``[B, T, H]`` or ``[B, T, H, d]`` holds an infinity or NaN."""
    # A sum of squares is finite only if all of them are, or overflows, which is as good as infinite for a token.
    sums = [t if t.dim() == 3 else t.float().square().sum(-1) for t in tensors]
    return ~torch.stack([s.isfinite() for s in sums]).all(0)


def _last(marked: Tensor) -> Tensor:
    """Index of the last marked token up to each token, -1 before the first; ``[B, T, H]``."""
    index = torch.arange(marked.shape[1], device=marked.device).view(1, -1, 1)
    return torch.where(marked, index, -1).cummax(1).values


def from_then_on(bad: Tensor, starts: Tensor) -> Tensor:
    """Tokens at or after a bad one of their document; ``starts`` marks the documents' first tokens."""
    bad_at = _last(bad)
    return (bad_at >= 0) & (bad_at >= _last(starts))


def whole_documents(bad: Tensor, starts: Tensor) -> Tensor:
    """All tokens of documents that hold a bad one."""
    # Seen backwards, a document starts at its last token, the one before the next document's first.
    ends = torch.nn.functional.pad(starts[:, 1:], (0, 0, 0, 1))
    after = from_then_on(bad.flip(1), ends.flip(1)).flip(1)
    return from_then_on(bad, starts) | after


class Tainted:
    """What is not finite in the inputs of a call with resets, and what depends on it."""

    def __init__(self, inputs: Inputs) -> None:
        q, k, v, log_alpha, beta, first, state = inputs
        assert first is not None
        self.inputs = inputs
        self.starts = drops(log_alpha, first)
        # -inf is a log_alpha like any other: it drops the state.
        self.bad = not_finite(q, k, v, log_alpha.clamp(min=-1.0), beta)
        self.bad_state = None if state is None else ~state.float().square().sum((2, 3)).isfinite()

    def clean(self) -> Inputs:
        """The inputs with zeros in place of bad tokens and states."""
        q, k, v, log_alpha, beta, first, state = self.inputs
        q, k, v = (torch.where(self.bad[..., None], 0, x) for x in (q, k, v))
        log_alpha, beta = (torch.where(self.bad, 0, x) for x in (log_alpha, beta))
        if state is not None and self.bad_state is not None:
            state = torch.where(self.bad_state[..., None, None], 0, state)
        return Inputs(q, k, v, log_alpha, beta, first, state)

    def _with_state(self, bad: Tensor) -> Tensor:
        """Also the tokens that continue from a bad state."""
        if self.bad_state is None:
            return bad
        return bad | ((_last(self.starts) < 0) & self.bad_state[:, None])

    def outputs(self, o: Tensor, final_state: Tensor) -> tuple[Tensor, Tensor]:
        """NaN in all that depends on a bad token or state."""
        bad = self._with_state(from_then_on(self.bad, self.starts))
        return o.masked_fill(bad[..., None], torch.nan), final_state.masked_fill(bad[:, -1, :, None, None], torch.nan)

    def clean_gradients(self, grad_o: Tensor, grad_final_state: Tensor) -> tuple[Tensor, Tensor]:
        """Incoming gradients with zeros in place of what is not finite; their documents count as bad from here on."""
        bad, bad_final = not_finite(grad_o), ~grad_final_state.float().square().sum((2, 3)).isfinite()
        self.bad = self.bad | bad
        self.bad[:, -1] |= bad_final
        grad_o = torch.where(bad[..., None], 0, grad_o)
        return grad_o, torch.where(bad_final[..., None, None], 0, grad_final_state)

    def gradients(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """NaN in every gradient of a document that holds something bad, and of the state it continues from."""
        bad = self._with_state(whole_documents(self.bad, self.starts))
        *of_tokens, of_state = grads
        masked = [g.masked_fill(bad if g.dim() == 3 else bad[..., None], torch.nan) for g in of_tokens]
        continued = bad[:, 0] & ~self.starts[:, 0]
        return *masked, of_state.masked_fill(continued[..., None, None], torch.nan)
