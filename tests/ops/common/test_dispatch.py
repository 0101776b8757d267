"""The choice of plans by shape from a calibration record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samu_lm.ops.common import dispatch
from samu_lm.ops.common.dispatch import Entry, choose, read_record
from samu_lm.ops.samu.kernel_plan import OP, Plan, plan_for, use_plan


def entry(batch: int, length: int, width: int, name: str) -> Entry:
    return Entry(batch, length, width, name, {"chunk": 32}, 1.0, "other", 0.1)


ENTRIES = (
    entry(1, 8192, 1024, "short"),
    entry(1, 131072, 1024, "long"),
    entry(4, 2048, 2048, "wide"),
    entry(1, 32768, 2048, "wide and long"),
)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 8192, 1024), "short"),
        ((1, 1, 2), "short"),
        ((1, 32767, 1024), "short"),  # the middle, by ratio, is 32,768
        ((1, 32768, 1024), "long"),
        ((64, 65536, 1024), "long"),
        ((1, 8192, 1448), "short"),  # the middle of the widths is 1448.15
        ((1, 8192, 1450), "wide"),
        ((8, 1024, 2560), "wide"),
        ((1, 131072, 4096), "wide and long"),
    ],
)
def test_nearest_by_ratio(shape: tuple[int, int, int], name: str) -> None:
    found = choose(ENTRIES, *shape)
    assert found is not None
    assert found.choice == name


def test_without_a_record(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none.json") == ({}, ())
    assert choose((), 1, 2, 4) is None


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dispatch_x.json"
    path.write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="samu-lm calibrate"):
        read_record(path)


def test_the_record_of_the_package_is_whole() -> None:
    """Every entry of the record names a plan that exists, and what it was measured with."""
    environment, entries = read_record(dispatch.record_path(OP))
    if entries:
        assert {"gpu", "torch", "triton"} <= set(environment)
    for found in entries:
        assert Plan(**found.fields).for_shape(found.length, found.width // 2)
        assert found.margin >= -0.03


def test_a_measured_shape_takes_its_own_plan() -> None:
    _, entries = read_record(dispatch.record_path(OP))
    for found in entries:
        assert dispatch.choose(entries, found.batch, found.length, found.width) is found


@pytest.mark.parametrize("width", [2, 6, 130, 1024, 2560])
@pytest.mark.parametrize("length", [1, 15, 16, 100, 131072])
def test_plans_fit_their_problem(length: int, width: int) -> None:
    plan = plan_for(1, length, width)
    assert plan.chunk >= max(plan.step, plan.gradient_step, plan.save_every)
    assert plan.chunk < 2 * length or plan.chunk == max(16, plan.save_every * max(1, plan.save_skip))
    assert plan.chunk % (plan.save_every * max(1, plan.save_skip)) == 0
    assert plan.save_every % plan.gradient_step == 0


def test_a_plan_in_force_is_the_one_used() -> None:
    with use_plan(Plan(chunk=128)):
        assert plan_for(1, 4096, 64).chunk == 128
