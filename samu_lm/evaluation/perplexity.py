"""Teacher-forced loss of a model over packed rows, summed as the rows stream by.

Sizes: B rows, L tokens a row, N targets of a batch, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from samu_lm.data.batch import Batch, document_positions
from samu_lm.evaluation.totals import Totals
from samu_lm.model import RecurrentLM

# Logits held at once, as a count of float32: 128 MiB, whatever the batch and the vocabulary.
LOGITS_AT_ONCE = 2**25


@dataclass
class StreamCounts:
    """What the rows held. A document counts once it has a target; its pieces in later rows do not count again.

    Attributes:
        rows: rows that hold tokens, those that only fill up a batch not counted.
        documents: documents with at least one target among these rows.
        continued_rows: rows that start inside a document, where the state starts afresh.
        tokens: tokens read, padding not counted.
    """

    rows: int = 0
    documents: int = 0
    continued_rows: int = 0
    tokens: int = 0
    _open: bool = False

    def add(self, batch: Batch) -> None:
        """Counts a batch whose rows follow, in the token stream, those counted before."""
        mask, reset = batch.loss_mask.cpu(), batch.reset.cpu()
        # The last token of a row has a target exactly when its document goes on in the next row.
        ends_open = mask[:, -1]
        continues = torch.cat([torch.tensor([self._open]), ends_open[:-1]])
        starts = reset.clone()
        starts[:, 0] = ~continues
        self.rows += int((mask.any(dim=1) | continues).sum())
        self.documents += int((starts & mask).sum())
        self.continued_rows += int(continues.sum())
        # A finished document of n tokens has n - 1 targets; one cut off by the end of the rows has n.
        self.tokens += int(mask.sum()) + int((starts & mask).sum()) - (int(ends_open[-1]) - int(self._open))
        self._open = bool(ends_open[-1])


def token_losses(hidden_of: Callable[..., tuple[Tensor, object]], model: RecurrentLM, batch: Batch) -> Tensor:
    """Cross-entropy of each target in nats, in row order.

    Args:
        hidden_of: `model.hidden`, compiled or not.
        model: gives the output projection.
        batch: rows on the model's device.

    Returns:
        float32 [N], for the True places of `batch.loss_mask`.
    """
    hidden, _ = hidden_of(batch.tokens, reset=batch.reset)
    hidden, targets = hidden[batch.loss_mask], batch.targets[batch.loss_mask]
    pieces = max(1, LOGITS_AT_ONCE // model.vocab_size)
    losses = [
        functional.cross_entropy(model.logits(h).float(), t, reduction="none")
        for h, t in zip(hidden.split(pieces), targets.split(pieces), strict=True)
    ]
    return torch.cat(losses)


def accumulate(
    model: RecurrentLM,
    batches: Iterable[Batch],
    totals: Totals,
    *,
    device: torch.device,
    compiled: bool = False,
    max_rows: int | None = None,
    report: Callable[[int], None] | None = None,
) -> StreamCounts:
    """Evaluates rows in order, each from an empty state, adding to `totals`.

    Args:
        model: in evaluation mode, on `device`.
        batches: rows in the order of the token stream.
        totals: gets every target's loss.
        device: where the rows go.
        compiled: run the model under torch.compile.
        max_rows: stop after so many rows.
        report: called with the number of rows read after each batch.

    Returns:
        What the rows held.
    """
    hidden_of = torch.compile(model.hidden) if compiled else model.hidden
    counts, taken = StreamCounts(), 0
    with torch.inference_mode():
        for batch in batches:
            if max_rows is not None:
                batch = first_rows(batch, max_rows - taken)
            taken += batch.tokens.shape[0]
            counts.add(batch)
            batch = batch.to(device)
            losses = token_losses(hidden_of, model, batch)
            read = document_positions(batch.reset)[batch.loss_mask] + 1  # the input token itself included
            totals.add(losses, batch.targets[batch.loss_mask], read)
            if report is not None:
                report(taken)
            if taken == max_rows:
                break
    return counts


def first_rows(batch: Batch, rows: int) -> Batch:
    """The first `rows` rows of a batch, all of it when it has no more."""
    if batch.tokens.shape[0] <= rows:
        return batch
    return Batch(batch.tokens[:rows], batch.targets[:rows], batch.reset[:rows], batch.loss_mask[:rows])
