"""One batch of packed rows. Shapes: B rows, L tokens a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


# Not frozen, although nothing changes a batch: Lightning's precision plugins rebuild every dataclass they meet field by
# field and refuse a frozen one, so that training with bf16 would stop at its first batch.
@dataclass(eq=False)
class Batch:
    """Rows of packed documents, ready for the model.

    Attributes:
        tokens: ``[B, L]`` int64, the model's input.
        targets: ``[B, L]`` int64, the token after each input token in its document; the pad id where there is none.
        reset: ``[B, L]`` bool, True at each document's first token, at the first token of every row (a document that
            goes on from an earlier row starts there with an empty state) and at the first pad.
        loss_mask: ``[B, L]`` bool, True where ``targets`` holds a real target.
    """

    tokens: Tensor
    targets: Tensor
    reset: Tensor
    loss_mask: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``; pinned memory is copied to an accelerator without waiting."""
        # Only towards an accelerator: there the stream orders the copy before its use, on the way back nothing would.
        non_blocking = torch.device(device).type != "cpu"
        return Batch(*(t.to(device, non_blocking=non_blocking) for t in self._tensors()))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return Batch(*(t.pin_memory() for t in self._tensors()))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.targets, self.reset, self.loss_mask


def document_positions(reset: Tensor) -> Tensor:
    """Position of each token within its document as the model sees it: 0 at each first token, then 1, 2, ...

    Args:
        reset: ``[B, L]`` bool, True at first tokens. A row that does not begin with one counts from its own start.

    Returns:
        ``[B, L]`` int64.
    """
    index = torch.arange(reset.shape[1], device=reset.device).expand(reset.shape)
    return index - torch.where(reset, index, 0).cummax(dim=1).values
