"""The held-out split: by document, a pure function of the documents' contents and the fraction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from samu_lm.errors import ConfigError


def content_hash(text: bytes) -> int:
    """64-bit hash of a document, uniform in [0, 2**64)."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def held_out_threshold(hashes: NDArray[np.uint64], fraction: float, count: int | None = None) -> int:
    """The hash below which a document is held out.

    It is ``fraction`` of the hashes' range, so that a document keeps its side while a corpus grows, and equal documents
    are on the same side. A small corpus may have no hash there: then the smallest is held out, and likewise the largest
    is kept for training.

    Args:
        hashes: ``[N]`` uint64, ``content_hash`` of each document, or the least and the greatest of them.
        fraction: between 0 and 1, both excluded.
        count: number of documents, for the error; None for N.

    Raises:
        ConfigError: fewer than two different documents, so that one side would be empty.
    """
    least, greatest = int(hashes.min()), int(hashes.max())
    if least == greatest:
        count = len(hashes) if count is None else count
        remedy = (
            f"needs two different documents, one to train on and one to hold out, and found 1 in {count}; "
            "add documents, or cut a text file into documents with data.separator"
        )
        raise ConfigError("data", f"({count} documents)", remedy)
    return min(max(int(fraction * 2.0**64), least + 1), greatest)


def threshold_of_stream(hashes: Iterable[int], fraction: float) -> int:
    """`held_out_threshold` of hashes that come one by one; stops once no later hash can change it."""
    plain = int(fraction * 2.0**64)
    least, greatest, count = 2**64, -1, 0
    for value in hashes:
        least, greatest, count = min(least, value), max(greatest, value), count + 1
        if least < plain <= greatest:
            return plain
    return held_out_threshold(np.array([least, greatest], dtype=np.uint64), fraction, count)


def held_out(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """``[N]`` bool, True for the documents of the validation split; arguments and errors of ``held_out_threshold``."""
    return hashes < np.uint64(held_out_threshold(hashes, fraction))
