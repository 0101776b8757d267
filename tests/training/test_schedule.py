from __future__ import annotations

import math
from typing import Any

import pytest

from samu_lm.errors import ConfigError
from samu_lm.training.schedule import WSD, Cosine


def test_cosine() -> None:
    schedule = Cosine(warmup_steps=4, final_ratio=0.1)
    factors = [schedule.factor(step, 20) for step in range(20)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    middle = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 5 / 15))
    assert factors[9] == pytest.approx(middle)
    assert factors[19] == pytest.approx(0.1)
    assert schedule.factor(1000, 20) == pytest.approx(0.1)


def test_wsd() -> None:
    schedule = WSD(warmup_steps=3, decay_steps=5, final_ratio=0.0)
    factors = [schedule.factor(step, 20) for step in range(20)]
    assert factors[:3] == pytest.approx([0.25, 0.5, 0.75])
    assert factors[3:15] == [1.0] * 12
    assert factors[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_wsd_decays_over_a_fifth_unless_told() -> None:
    factors = [WSD(final_ratio=0.5).factor(step, 10) for step in range(10)]
    assert factors == pytest.approx([1.0] * 8 + [0.75, 0.5])


@pytest.mark.parametrize("schedule", [Cosine(), WSD(decay_steps=0), WSD()])
def test_a_run_of_one_step(schedule: Any) -> None:
    schedule.check(1)
    assert schedule.factor(0, 1) == 1.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cosine(warmup_steps=-1), r"^schedule\.warmup_steps=-1: must not be negative"),
        (lambda: WSD(warmup_steps=-1), r"^schedule\.warmup_steps=-1: must not be negative"),
        (lambda: Cosine(final_ratio=1.5), r"^schedule\.final_ratio=1\.5: must lie between 0 and 1"),
        (lambda: Cosine(total_steps=0), r"^schedule\.total_steps=0: must be at least 1"),
        (lambda: Cosine(warmup_steps=5, total_steps=5), r"^schedule\.warmup_steps=5: must be below schedule\.total_"),
        (lambda: Cosine(warmup_steps=5).check(5), r"^schedule\.warmup_steps=5: must be below trainer\.max_steps=5"),
        (lambda: WSD(warmup_steps=9).check(5), r"^schedule\.warmup_steps=9: must be below trainer\.max_steps=5"),
        (lambda: WSD(decay_steps=-2), r"^schedule\.decay_steps=-2: must not be negative"),
        (
            lambda: WSD(warmup_steps=3, decay_steps=3).check(5),
            r"^schedule\.decay_steps=3: with warmup_steps=3",
        ),
    ],
)
def test_refuses(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_its_own_length_replaces_the_run_s() -> None:
    Cosine(warmup_steps=9, total_steps=100).check(5)
    WSD(warmup_steps=9, decay_steps=5, total_steps=100).check(5)
