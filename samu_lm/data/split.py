"""The held-out split: by document, a pure function of the documents' contents and the fraction."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from samu_lm.errors import ConfigError


def content_hash(text: bytes) -> int:
    """64-bit hash of a document, uniform in [0, 2**64)."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def held_out_threshold(hashes: NDArray[np.uint64], fraction: float) -> int:
    """The hash below which a document is held out.

    It is ``fraction`` of the hashes' range, so that a document keeps its side while a corpus grows, and equal documents
    are on the same side. A small corpus may have no hash there: then the smallest is held out, and likewise the largest
    is kept for training.

    Args:
        hashes: ``[N]`` uint64, ``content_hash`` of each document.
        fraction: between 0 and 1, both excluded.

    Raises:
        ConfigError: fewer than two different documents, so that one side would be empty.
    """
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        remedy = (
            f"needs two different documents, one to train on and one to hold out, and found {len(distinct)} in "
            f"{len(hashes)}; add documents, or cut a text file into documents with data.separator"
        )
        raise ConfigError("data", f"({len(hashes)} documents)", remedy)
    return min(max(int(fraction * 2.0**64), int(distinct[0]) + 1), int(distinct[-1]))


def held_out(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """``[N]`` bool, True for the documents of the validation split; arguments and errors of ``held_out_threshold``."""
    return hashes < np.uint64(held_out_threshold(hashes, fraction))
