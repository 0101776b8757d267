"""Summaries of timing samples, in the fields that recorded results use."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def summary(samples: list[float]) -> dict[str, Any]:
    """Samples with their median, mean, standard deviation and range, all in milliseconds."""
    return {
        "samples_ms": samples,
        "median_ms": statistics.median(samples),
        "mean_ms": statistics.fmean(samples),
        "std_ms": statistics.pstdev(samples),
        "minimum_ms": min(samples),
        "maximum_ms": max(samples),
    }


def counterbalanced(rounds: int, items: Sequence[T]) -> Iterator[tuple[int, int, T]]:
    """(round, place in the round, item); every second round runs in reverse order."""
    for number in range(rounds):
        for place, item in enumerate(items if number % 2 == 0 else items[::-1]):
            yield number, place, item


def merge_rounds(rounds: list[dict[str, Any]], phases: tuple[str, ...]) -> dict[str, Any]:
    """Per phase the summary over all rounds, beside the rounds themselves."""
    merged: dict[str, Any] = {p: summary([s for r in rounds for s in r[f"{p}_ms"]]) for p in phases}
    merged["rounds"] = rounds
    return merged
