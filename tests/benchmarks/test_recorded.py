"""Recorded figures: the bars that hold, and documents that say what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samu_lm.benchmarks.report import MIB, mixer_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "kernels"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads((RESULTS / "mixer.json").read_text())


def row(result: dict[str, Any], architecture: str, shape: tuple[int, int, int], resets: str = "internal") -> Any:
    wanted = dict(zip(("batch", "length", "width"), shape, strict=True))
    (found,) = [
        r for r in result["rows"] if (r["architecture"], r["shape"], r["resets"]) == (architecture, wanted, resets)
    ]
    return found


def test_table_and_plot_are_those_of_the_record(result: dict[str, Any]) -> None:
    assert (RESULTS / "mixer.md").read_text() == mixer_table(result)
    assert (RESULTS / "mixer.png").stat().st_size > 10_000
    assert result["environment"]["gpu"] == "NVIDIA H200"
    assert result["command"].startswith("samu-lm bench mixer")


@pytest.mark.parametrize(
    ("architecture", "shape", "forward", "both", "mebibytes"),
    [
        ("samu", (1, 131072, 1024), 0.35, 1.3, 800),
        ("samu", (1, 32768, 1024), None, 0.30, None),
        ("samu", (4, 2048, 2048), None, 0.30, None),
        ("rglru", (1, 131072, 1024), 0.65, 2.2, 1300),
        ("rglru", (4, 2048, 2048), None, 0.35, None),
    ],
)
def test_bars(
    result: dict[str, Any],
    architecture: str,
    shape: tuple[int, int, int],
    forward: float | None,
    both: float,
    mebibytes: int | None,
) -> None:
    found = row(result, architecture, shape)
    assert found["forward_backward_queued_ms"] <= both
    assert forward is None or found["forward_queued_ms"] <= forward
    assert mebibytes is None or found["peak_allocated_delta_bytes"] <= mebibytes * MIB
    assert len(found["launches"]) <= 12


def test_resets_cost_little_at_long_rows(result: dict[str, Any]) -> None:
    for architecture in ("samu", "rglru"):
        with_resets, without = (row(result, architecture, (1, 131072, 1024), resets) for resets in ("internal", "none"))
        assert with_resets["forward_backward_queued_ms"] <= 1.03 * without["forward_backward_queued_ms"]


def test_documents_say_what_was_recorded(result: dict[str, Any]) -> None:
    """Every row of the table in docs/kernels.md is made of the record's figures."""
    lines = (ROOT / "docs" / "kernels.md").read_text().splitlines()
    start = lines.index("<!-- figures: kernels/mixer.json -->") + 3
    rows = 0
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        shape, architecture, *figures = (cell.strip() for cell in line.strip("|").split("|"))
        batch, length, width = (int(n) for n in shape.strip("()").split(","))
        found = row(result, architecture, (batch, length, width))
        assert figures == [
            f"{found['forward_queued_ms']:.3f}",
            f"{found['forward_backward_queued_ms']:.3f}",
            f"{found['forward_backward_fraction_of_copy']:.0%}",
            f"{found['forward_backward']['median_ms']:.3f}",
            f"{found['forward_backward_graph_ms']:.3f}",
            f"{found['peak_allocated_delta_bytes'] / MIB:.0f}",
            str(len(found["launches"])),
        ]
        rows += 1
    assert rows == 15


def test_readme_says_what_was_recorded(result: dict[str, Any]) -> None:
    text = (ROOT / "README.md").read_text()
    for shape in ((1, 131072, 1024), (1, 32768, 1024), (4, 2048, 2048)):
        samu, rglru = (row(result, name, shape) for name in ("samu", "rglru"))
        figures = [r["forward_backward_queued_ms"] for r in (samu, rglru)] + [samu["floor_forward_backward_ms"]]
        assert f"| {shape} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |" in text
