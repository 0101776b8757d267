"""The running sums against a slow plain computation, and figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.evaluation.totals import (
    PositionBin,
    Totals,
    position_bin,
    summarise,
)

TARGETS = st.tuples(st.floats(0, 20), st.integers(0, 9), st.integers(1, 300))  # loss, id, position


def test_position_bins_end_at_powers_of_two() -> None:
    positions = torch.arange(1, 70_000)
    expected = [(p - 1).bit_length() for p in positions.tolist()]
    assert position_bin(positions).tolist() == expected
    assert position_bin(torch.tensor([1, 2, 3, 4, 5, 8, 9, 2**40, 2**40 + 1])).tolist() == [0, 1, 2, 2, 3, 3, 4, 40, 41]


@settings(max_examples=20, deadline=None)
@given(st.lists(TARGETS, min_size=1, max_size=60), st.integers(1, 9))
def test_sums_equal_a_plain_computation_however_they_are_cut(targets: list[tuple[float, int, int]], cut: int) -> None:
    size = np.array([1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    totals = Totals(size)
    for start in range(0, len(targets), cut):
        losses, ids, positions = zip(*targets[start : start + cut], strict=True)
        totals.add(torch.tensor(losses, dtype=torch.float64), torch.tensor(ids), torch.tensor(positions))
    assert totals.targets == len(targets)
    assert totals.bytes == sum(int(size[i]) for _, i, _ in targets)
    assert totals.nats == pytest.approx(math.fsum(loss for loss, _, _ in targets), rel=1e-12, abs=1e-12)
    bins: dict[int, list[tuple[float, int]]] = {}
    for loss, token, position in targets:
        bins.setdefault((position - 1).bit_length(), []).append((loss, int(size[token])))
    found = totals.by_position()
    assert [(b.first, b.last) for b in found] == [(2**k // 2 + 1, 2**k) for k in sorted(bins)]
    for b, k in zip(found, sorted(bins), strict=True):
        values = [loss for loss, _ in bins[k]]
        assert (b.targets, b.bytes) == (len(values), sum(n for _, n in bins[k]))
        assert b.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-12)
        if len(values) > 1:
            error = np.std(values, ddof=1) / math.sqrt(len(values))
            assert b.standard_error == pytest.approx(error, rel=1e-6, abs=1e-6)
        else:
            assert math.isnan(b.standard_error)


def test_sums_by_position_equal_the_total() -> None:
    totals = Totals(np.ones(5, dtype=np.int64))
    generator = torch.Generator().manual_seed(0)
    for _ in range(7):
        n = 100
        totals.add(
            torch.rand(n, generator=generator),
            torch.randint(0, 5, (n,), generator=generator),
            torch.randint(1, 500, (n,), generator=generator),
        )
    figures = summarise(totals, 8.0)
    assert sum(b["targets"] for b in figures["by_position"]) == figures["targets"] == 700
    assert sum(b["bytes"] for b in figures["by_position"]) == figures["bytes"] == 700
    assert math.fsum(b["nats"] for b in figures["by_position"]) == pytest.approx(figures["nats"], rel=1e-13)


def test_small_losses_among_many_are_not_lost() -> None:
    """float32 would stop counting: 2^24 ones, then ones that no longer change the sum."""
    totals = Totals(np.ones(1, dtype=np.int64))
    totals._bin_nats[0] = 2.0**24
    totals.add(torch.ones(10), torch.zeros(10, dtype=torch.int64), torch.ones(10, dtype=torch.int64))
    assert totals.nats == 2.0**24 + 10


def test_summary_by_hand() -> None:
    # Targets "a", "b" and EOS at ln 2, ln 4 and ln 8: 6 ln 2 nats for 2 bytes, so 3 bits per byte.
    totals = Totals(np.array([1] * 256 + [0, 0]))
    ids = torch.tensor([97, 98, 257])
    totals.add(torch.log(torch.tensor([2.0, 4.0, 8.0], dtype=torch.float64)), ids, torch.tensor([1, 3, 4]))
    figures = summarise(totals, 1.5)
    assert figures["targets"] == 3
    assert figures["bytes"] == 2
    assert figures["nats_per_token"] == pytest.approx(2 * math.log(2))
    assert figures["perplexity"] == pytest.approx(4.0)
    assert figures["bits_per_byte"] == pytest.approx(3.0)
    assert figures["unigram_bits_per_byte"] == 1.5
    assert figures["ratio_to_unigram"] == pytest.approx(2.0)
    first, second = figures["by_position"]
    assert (first["first"], first["last"], first["targets"], first["standard_error"]) == (1, 1, 1, None)
    assert (second["first"], second["last"], second["targets"]) == (3, 4, 2)
    # Values 2 ln 2 and 3 ln 2: standard deviation ln 2 / sqrt 2, error ln 2 / 2.
    assert second["standard_error"] == pytest.approx(math.log(2) / 2)


def test_no_text_gives_no_figure_per_byte() -> None:
    totals = Totals(np.zeros(3, dtype=np.int64))
    totals.add(torch.tensor([1.0]), torch.tensor([2]), torch.tensor([1]))
    figures = summarise(totals, 0.0)
    assert figures["bits_per_byte"] is None
    assert figures["ratio_to_unigram"] is None
    assert totals.by_position() == [PositionBin(1, 1, 1, 0, 1.0, 1.0, pytest.approx(math.nan, nan_ok=True))]
