"""Compiling in processes beside each other before anything is timed: Triton keeps what it compiled on the disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def default_jobs() -> int:
    """Processes that this machine has cores for, at most 12."""
    return max(1, min(12, len(os.sched_getaffinity(0)) - 1))


def run_beside(function: Callable[[Any], object], items: Sequence[Any], jobs: int) -> None:
    """Calls ``function`` on every item in up to ``jobs`` fresh processes; their results are dropped.

    Raises:
        Exception: the first one that a call raised.
    """
    if jobs <= 1 or len(items) <= 1:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), mp_context=context) as pool:
        list(pool.map(function, items))
