"""``samu-lm bench mixer``: correctness before times, the recorded schema, tables and plots of what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.benchmarks import cases, mixer, timing
from samu_lm.benchmarks.float64 import NAMES, draw_mixer, mixer64
from samu_lm.cli import main
from samu_lm.ops import samu_mixer
from tests.ops.support import relative_error

SUMMARY = {"samples_ms", "median_ms", "mean_ms", "std_ms", "minimum_ms", "maximum_ms"}
# The fields of a row in the tables that this one is compared with.
FIELDS = {
    "shape", "architecture", "backend", "controller", "forward", "backward", "forward_backward", "rounds",
    "peak_allocated_delta_bytes", "peak_reserved_delta_bytes", "peak_allocated_bytes", "peak_reserved_bytes",
    "baseline_allocated_bytes", "baseline_reserved_bytes", "parameters", "parameter_bytes",
    "dynamic_control_values_per_token", "materialized_state_sized_transition",
}  # fmt: skip
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command on a machine without a GPU: interpreted kernels, and a clock that always says 2 ms."""
    clocked: list[str] = []

    def samples(call: Any, repeats: int, warmup: int = 0) -> list[float]:
        clocked.append(call.__qualname__)
        return [2.0] * repeats

    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(mixer, "require_gpu", lambda: None)
    monkeypatch.setattr(timing, "event_samples", samples)
    for name in ("queued_median", "graph_median", "host_time"):
        monkeypatch.setattr(timing, name, lambda call: 2.0)
    sizes = ("peak_allocated_delta", "peak_reserved_delta", "peak_allocated", "peak_reserved")
    sizes = (*sizes, "baseline_allocated", "baseline_reserved")
    monkeypatch.setattr(timing, "peak_memory", lambda call: {f"{size}_bytes": 2**20 for size in sizes})
    monkeypatch.setattr(timing, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(timing, "kernel_times", lambda call: [("kernel", 1.0)])
    return clocked


def run(output: Path, *arguments: str) -> int:
    return main(
        ["bench", "mixer", "--shapes", "1,20,32", "--repeats", "1", "--jobs", "1", "--output", str(output), *arguments]
    )


def test_table_json_and_plot(on_cpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new folder" / "mixer.json"
    assert run(output) == 0
    result = json.loads(output.read_text())
    assert result["schema_version"] == 1
    assert [(row["architecture"], row["resets"]) for row in result["rows"]] == [
        (name, resets) for name in ("rglru", "samu") for resets in ("internal", "none")
    ]
    for row in result["rows"]:
        assert row.keys() >= FIELDS
        for phase in cases.PHASES:
            assert row[phase].keys() == SUMMARY
            assert len(row[phase]["samples_ms"]) == 2
        assert row["forward_fraction_of_copy"] == pytest.approx(4 * 20 * 32 / 4e12 * 1e3 / 2)
        assert set(row["errors"]) == {"float32", "bfloat16"}
    # Forward order, then reverse order.
    order = [[r["order_index"] for r in row["rounds"]] for row in result["rows"]]
    assert order == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert [row["parameters"] for row in result["rows"]] == [2 * (16 * 4 + 32) + 32] * 2 + [3 * 32 + 4] * 2
    table = output.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n| (1, 20, 32) | ") == 4
    assert output.with_suffix(".png").stat().st_size > 5000


def test_no_time_without_agreement(
    on_cpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output that is off by a thousandth is found, and nothing is clocked or written."""

    def slightly_off(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, state = samu_mixer(*args, **kwargs)
        return y * 1.001, state

    monkeypatch.setattr(cases, "samu_mixer", slightly_off)
    output = tmp_path / "mixer.json"
    assert run(output, "--architectures", "samu") == 2
    assert "y is off by 1.0e-03 (bound 2e-06)" in capsys.readouterr().err
    assert on_cpu == []
    assert not output.exists()


def test_report_of_a_recorded_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, fault in ((None, "no such file"), ("{", "is not JSON"), ("{}", "holds no mixer rows")):
        path = tmp_path / "result.json"
        if content is not None:
            path.write_text(content)
        assert main(["bench", "mixer", "--report", str(path)]) == 2
        assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument", [["--rounds", "0"], ["--repeats", "0"], ["--shapes", "1,2"], ["--shapes", "1,2,3"]]
)
def test_odd_arguments(argument: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["bench", "mixer"], ["calibrate"]):
        assert main([*command, *argument]) == 2
        error = capsys.readouterr().err
        assert argument[0] in error
        assert argument[1] in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["bench", "mixer"], ["calibrate"]])
def test_without_a_gpu(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "CUDA GPU" in capsys.readouterr().err


def test_float64_is_the_function() -> None:
    """What times are gated by agrees with the reference backend, gradients included."""
    inputs, first, grad_y = draw_mixer((2, 50, 12), torch.float64, "cpu", document=9)
    expected = mixer64(inputs, first, grad_y)
    leaves = [inputs[name].float().requires_grad_() for name in NAMES]
    y, _ = samu_mixer(*leaves, reset=first, backend="reference")
    for name, value in zip(("y", *NAMES), (y, *torch.autograd.grad(y, leaves, grad_y.float())), strict=True):
        assert relative_error(value, expected[name]) < 1e-5, name
