"""Running sums of an evaluation: constant memory, float64, the same whatever the batch size.

Sizes: B rows, L tokens, N targets of a batch, V vocabulary, K position bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

NATS_PER_BIT = math.log(2.0)


def position_bin(positions: Tensor) -> Tensor:
    """Bin 0 holds position 1, bin k positions 2^(k-1) + 1 to 2^k, so that a row of 2^k tokens ends with a full bin.

    int64 in, int64 out; exact below 2^53.
    """
    return torch.frexp((positions - 1).double())[1].long()


@dataclass(frozen=True)
class PositionBin:
    """Targets predicted after `first` to `last` tokens of their document."""

    first: int
    last: int
    targets: int
    bytes: int
    nats: float
    mean: float
    standard_error: float


class Totals:
    """Sums over the targets seen so far.

    Args:
        bytes_per_token: int64 [V], bytes of text that each token id stands for; 0 for special tokens.
    """

    def __init__(self, bytes_per_token: np.ndarray) -> None:
        self.bytes_per_token = torch.as_tensor(np.asarray(bytes_per_token), dtype=torch.int64)
        self._bin_targets = torch.zeros(64, dtype=torch.int64)
        self._bin_bytes = torch.zeros(64, dtype=torch.int64)
        self._bin_nats = torch.zeros(64, dtype=torch.float64)
        self._bin_squares = torch.zeros(64, dtype=torch.float64)

    def add(self, losses: Tensor, targets: Tensor, positions: Tensor) -> None:
        """Adds a batch's targets.

        Args:
            losses: nats per target, floating [N].
            targets: ids [N], below V.
            positions: tokens of the document read when the target is predicted, int64 [N], at least 1.
        """
        losses, targets = losses.detach().double().cpu(), targets.cpu()
        bins = position_bin(positions.cpu())
        size = len(self._bin_targets)
        self._bin_targets += torch.bincount(bins, minlength=size)
        # Counts of bytes stay below 2^53 in any corpus, so the float64 of weighted bincount is exact.
        self._bin_bytes += torch.bincount(bins, self.bytes_per_token[targets].double(), minlength=size).long()
        self._bin_nats += torch.bincount(bins, losses, minlength=size)
        self._bin_squares += torch.bincount(bins, losses.square(), minlength=size)

    @property
    def targets(self) -> int:
        return int(self._bin_targets.sum())

    @property
    def bytes(self) -> int:
        """Bytes of text that the targets stand for."""
        return int(self._bin_bytes.sum())

    @property
    def nats(self) -> float:
        return float(self._bin_nats.sum())

    def by_position(self) -> list[PositionBin]:
        """Bins from the first to the last that has a target, empty ones between them left out."""
        bins = []
        for k in torch.nonzero(self._bin_targets).flatten().tolist():
            count, nats = int(self._bin_targets[k]), float(self._bin_nats[k])
            mean = nats / count
            # Sample variance; one target alone has no spread to measure.
            spread = max(float(self._bin_squares[k]) - count * mean * mean, 0.0)
            error = math.sqrt(spread / (count - 1) / count) if count > 1 else math.nan
            bins.append(PositionBin(2**k // 2 + 1, 2**k, count, int(self._bin_bytes[k]), nats, mean, error))
        return bins


def summarise(totals: Totals, unigram_bits: float) -> dict[str, Any]:
    """Figures of an evaluation, ready for JSON.

    Args:
        totals: the sums, with at least one target.
        unigram_bits: entropy of the text's bytes taken one by one, in bits per byte: what a model without any context
            pays at best, a floor that a model must beat.

    Returns:
        targets, bytes, nats, nats_per_token, perplexity, bits_per_byte, unigram_bits_per_byte, ratio_to_unigram,
        by_position (a list of bins). A figure that is not defined, as bits per byte without text, is None.
    """
    nats, targets, text = totals.nats, totals.targets, totals.bytes
    per_token = nats / targets
    bits = nats / NATS_PER_BIT / text if text else None
    return {
        "targets": targets,
        "bytes": text,
        "nats": nats,
        "nats_per_token": per_token,
        "perplexity": math.exp(per_token) if per_token < 700 else None,  # beyond float64's range
        "bits_per_byte": bits,
        "unigram_bits_per_byte": unigram_bits,
        "ratio_to_unigram": bits / unigram_bits if bits is not None and unigram_bits else None,
        "by_position": [
            {
                "first": b.first,
                "last": b.last,
                "targets": b.targets,
                "bytes": b.bytes,
                "nats": b.nats,
                "nats_per_token": b.mean,
                "standard_error": None if math.isnan(b.standard_error) else b.standard_error,
            }
            for b in totals.by_position()
        ],
    }
