"""Recorded figures: the bars that hold, and documents that say what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samu_lm.benchmarks import block, decode, delta_table, step
from samu_lm.benchmarks.report import MIB, mixer_table
from samu_lm.evaluation.runs import Run, read_run
from samu_lm.ops.decode import default_plan

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results"
RESULTS = RECORDS / "kernels"
STEPS = ("step_samu", "step_rglru")
STEPS_BEFORE = ("rows_samu", "step_rglru_before", "step_rglru_before_again")
LONG = ("million_samu", "million_rglru", "row_262144")
RUNS = ("samu", "rglru", "samu_fp8", "samu_resumed")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()


def read(*parts: str) -> Any:
    return json.loads(RECORDS.joinpath(*parts).read_text())


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
        ("samu", (1, 131072, 1024), 0.35, 0.80, 600),
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


@pytest.mark.parametrize("shape", [(1, 131072, 1024), (4, 2048, 2048)])
@pytest.mark.parametrize("name", ["samu", "causal_conv1d"])
def test_what_resets_cost(result: dict[str, Any], name: str, shape: tuple[int, int, int]) -> None:
    """At most 3%, and the document says it."""
    times = [row(result, name, shape, resets)["forward_backward_queued_ms"] for resets in ("internal", "none")]
    text = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    assert times[0] <= 1.03 * times[1]
    assert f"{times[0]:.3f} with, {times[1]:.3f} without" in text


def test_plans_of_wide_blocks() -> None:
    record, text = read("kernels", "rglru_plans.json"), (ROOT / "docs" / "kernels-rglru.md").read_text()
    found = [r for r in record["rows"] if r["shape"] == [8, 8192, 2048]]
    assert len(found) == 8
    for one in found:
        kernels = [f"{one['kernels_us'][name]:.0f}" for name in ("forward", "gradient", "projection")]
        assert f"| {one['plan']} | " + " | ".join(kernels) + " |" in text


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


# -- the 400m model ---------------------------------------------------------------------------------------------------


def table_rows(table: str) -> list[str]:
    """The lines of a Markdown table that hold figures."""
    return [line for line in table.splitlines() if line.startswith("|") and any(c.isdigit() for c in line)]


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    """The table of the record, its lines in the documents, and 45% of the peak (SAMU 55%)."""
    record = read("step", f"{name}.json")
    assert (RECORDS / "step" / f"{name}.md").read_text() == step.table(record)
    assert record["command"].startswith("samu-lm bench step")
    assert record["environment"]["gpu"] == "NVIDIA H200"
    for line in table_rows(step.table(record)):
        assert line in PERFORMANCE
    for found in record["rows"]:
        assert found["utilisation"] >= (0.55 if found["architecture"] == "samu" else 0.45)
        if "parts_ms" in found:
            assert sum(found["parts_ms"].values()) == pytest.approx(found["median_ms"])
        if "parts_ms" in found and found["length"] == 8192:
            cells = [f"{found['median_ms']:.1f}", f"{found['tokens_per_second']:,.0f}", f"{found['utilisation']:.1%}"]
            line = f"| `{found['architecture']}_400m` | " + " | ".join(cells) + " |"
            assert line in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", STEPS_BEFORE)
def test_steps_of_earlier_kernels(name: str) -> None:
    record = read("step", f"{name}.json")
    assert (RECORDS / "step" / f"{name}.md").read_text() == step.table(record)
    speed = [line for line in table_rows(step.table(record)) if "(" not in line]
    assert speed
    assert all(line in PERFORMANCE for line in speed)


def test_a_step_gains_a_percent_side_by_side() -> None:
    record = read("step", "side_by_side.json")
    for times in record["steps"].values():
        assert times["after"]["median_ms"] < 0.991 * times["before"]["median_ms"]
        assert f"{times['before']['median_ms']:.1f} to {times['after']['median_ms']:.1f}" in PERFORMANCE
    parts = record["products"]["last_weight_gradient_tflops"]
    assert f"{parts['whole']} to {parts['2 parts']} TFLOP/s" in PERFORMANCE


@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str) -> None:
    """One row on one GPU: 40% of the peak at a million tokens, and the record's lines in the document."""
    record = read("step", f"{name}.json")
    assert (RECORDS / "step" / f"{name}.md").read_text() == step.table(record)
    assert record["protocol"]["activation_checkpointing"] == "block"
    for line in table_rows(step.table(record)):
        assert line in PERFORMANCE
    (found,) = record["rows"]
    assert found["rows"] == 1
    assert found["length"] < 2**20 or found["utilisation"] >= 0.40


def test_memory_is_linear_in_tokens() -> None:
    short, long = (read("step", f"{name}.json")["rows"][0] for name in ("row_262144", "million_samu"))
    tokens, bytes_ = (long[key] - short[key] for key in ("length", "peak_allocated_bytes"))
    fixed = short["peak_allocated_bytes"] - short["length"] * bytes_ / tokens
    text = f"{round(fixed / MIB, -2):,.0f} MiB and {bytes_ / tokens / 1024:.0f} KiB a token"
    assert text in PERFORMANCE


def test_blocks() -> None:
    record = read("block", "block.json")
    assert (RECORDS / "block" / "block.md").read_text() == block.table(record)
    for line in table_rows(block.table(record)):
        assert line in PERFORMANCE
    again = read("block", "block_again.json")
    assert (RECORDS / "block" / "block_again.md").read_text() == block.table(again)
    for line in table_rows(block.table(again)):
        assert line in PERFORMANCE
    (_, medium) = again["cases"]
    for found in medium["rows"]:
        assert found["optimizer_step"]["median_ms"] <= 7.5
    (short, _, long) = record["cases"]
    for found in short["rows"]:
        assert found["optimizer_step"]["median_ms"] <= 5
    assert long["case"] == "400m_block_long"
    for found in long["rows"]:
        assert found["optimizer_step"]["median_ms"] <= 14
        assert found["peak_allocated_delta_bytes"] <= 3200 * MIB


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
def test_decoding(mixer: str) -> None:
    record = read("decode", f"{mixer}.json")
    assert (RECORDS / "decode" / f"{mixer}.md").read_text() == decode.table(record)
    for line in table_rows(decode.table(record)):
        assert line in PERFORMANCE
    single = record["rows"][0]
    assert single["tokens_per_second"] >= 2500
    assert single["plan"] == default_plan(mixer).as_dict()
    tried = {found["name"]: found.get("median_ms") for found in read("decode", f"search_{mixer}.json")["candidates"]}
    best = min(time for time in tried.values() if time)
    assert f"{tried['default']:.3f} to {best:.3f}" in PERFORMANCE


def test_versions() -> None:
    """The versions that were measured with a probe stand in the document as recorded."""
    record = read("step", "probe.json")
    for found in record["versions"].values():
        if found is not record["versions"]["rglru, by blocks"]:
            assert f"| {found['median_ms']:.1f} | {found['utilisation']:.1%} |" in PERFORMANCE


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {name: read_run(RECORDS / "400m" / name, name) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert run.not_finite() == []
    assert run.series["train/loss"][-1][0] == 240
    train, (half, last) = run.last("train/loss"), [value for _, value in run.series["val/loss"]][-2:]
    speed, share, memory = (run.median(key) for key in ("tokens_per_second", "mfu", "memory/allocated"))
    cells = [f"{speed:,.0f}", f"{share:.1%}", f"{memory:.1f}", f"{train:.3f}", f"{half:.3f}", f"{last:.3f}"]
    assert f"| `{name}` | " + " | ".join(cells) + " |" in PERFORMANCE
    assert {"command", "packages", "python"} <= run.environment.keys()


@pytest.mark.parametrize("name", ["samu", "rglru"])
def test_loss_by_position(name: str, runs: dict[str, Run]) -> None:
    """Both models were evaluated on the whole held-out split, at the loss that their training ended with."""
    found = read("400m", name, "evaluation.json")
    assert found["nats_per_token"] == pytest.approx(runs[name].series["val/loss"][-1][1], rel=1e-3)
    assert sum(span["targets"] for span in found["by_position"]) == found["targets"] == 107_495
    (span,) = [span for span in found["by_position"] if span["first"] == 129]
    assert f"{span['nats_per_token']:.2f} nats" in PERFORMANCE


def test_no_loss_spike(runs: dict[str, Run]) -> None:
    """No logged loss lies more than a nat above the lowest of the four before it."""
    for run in runs.values():
        losses = [value for _, value in run.series["train/loss"]]
        assert all(loss < min(losses[max(0, i - 4) : i]) + 1 for i, loss in enumerate(losses) if i)


def test_the_resumed_run_repeats_the_straight_one(runs: dict[str, Run]) -> None:
    straight, resumed = (dict(runs[name].series["train/loss"]) for name in ("samu", "samu_resumed"))
    assert len(resumed) == 30
    assert resumed == {place: straight[place] for place in resumed}
    assert runs["samu"].series["val/loss"][-1] == runs["samu_resumed"].series["val/loss"][-1]


def test_runs_saw_the_same_tokens(runs: dict[str, Run]) -> None:
    for name in ("rglru", "samu_fp8"):
        assert runs[name].series["targets_seen"] == runs["samu"].series["targets_seen"]
        assert runs[name].series["lr"] == runs["samu"].series["lr"]


def test_the_report_of_the_runs_is_self_contained() -> None:
    report = (RECORDS / "400m" / "report.html").read_text()
    assert all(name in report for name in RUNS)
    assert "data:image/png;base64," in report
    assert 'src="http' not in report


# -- the gated delta rule ---------------------------------------------------------------------------------------------


def test_gated_delta_on_a_gpu() -> None:
    record = read("gated_delta", "delta_scale.json")
    text = (ROOT / "docs" / "gated-delta.md").read_text()
    times = {}
    for found in record["results"]:
        assert max(found["rel_err"]) < 2e-2
        times[found["impl"], found["mode"]] = found["median_ms"]
        cells = [f"{found['median_ms']:,.2f}", f"{found['fraction_of_matmul']:.2%}", f"{found['fraction_of_copy']:.2%}"]
        cells += [f"{found['peak_allocated_delta_bytes'] / MIB:,.0f}", f"{max(found['rel_err']):.1e}"]
        assert f"| `{found['impl']}` | {found['mode'].replace('_', ' + ')} | " + " | ".join(cells) + " |" in text
    assert times["ssd", "fwd_bwd"] < times["chunked", "fwd_bwd"] / 50


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_gated_delta_on_two_cores(length: int, d: int) -> None:
    """chunked is no slower than JAX and 4 times as fast as the loop; chunked_fat's backward is 5% faster yet."""
    record = read("gated_delta", "delta_cpu.json")
    assert (RECORDS / "gated_delta" / "delta_cpu.md").read_text() == delta_table.table(record)
    found = {(r["impl"], r["mode"]): r for r in record["results"] if (r["seq"], r["dk"]) == (length, d)}
    times = {key: r["median_ms"] for key, r in found.items() if "median_ms" in r}
    for mode in ("fwd", "fwd_bwd"):
        assert times["chunked", mode] <= times["jax_chunked", mode]
        if ("recurrent", mode) in times:
            assert 4 * times["chunked", mode] <= times["recurrent", mode]
        assert "requires an accelerator" in found["ssd", mode]["error"]
    backward = [times[impl, "fwd_bwd"] - times[impl, "fwd"] for impl in ("chunked_fat", "chunked")]
    assert backward[0] <= 0.95 * backward[1]
    cells = []
    for impl in ("recurrent", "chunked", "chunked_fat", "jax_chunked"):
        each = [f"{times[impl, mode]:,.1f}" if (impl, mode) in times else "left out" for mode in ("fwd", "fwd_bwd")]
        cells.append("left out" if set(each) == {"left out"} else " / ".join(each))
    line = f"| {length:,}, {d} | " + " | ".join(cells) + f" | {backward[0] / backward[1]:.2f} |"
    assert line in (ROOT / "docs" / "gated-delta.md").read_text()
    assert max(r["rel_err"] for r in found.values() if "rel_err" in r) < 1e-6
