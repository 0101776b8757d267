"""``samu-lm bench block``: agreement before times, and the recorded schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.benchmarks import block, timing
from samu_lm.cli import main

FIELDS = {
    "architecture", "backend", "controller", "optimizer_step", "baseline_allocated_bytes", "baseline_reserved_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_allocated_delta_bytes", "peak_reserved_delta_bytes",
    "parameters",
}  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A small case, interpreted, and a clock that always says 2 ms."""
    clocked: list[Any] = []

    def samples(call: Any, repeats: int) -> list[float]:
        clocked.append(call)
        return [2.0] * repeats

    monkeypatch.setattr(block, "DEVICE", "cpu")
    monkeypatch.setattr(block, "CHECKED", (1, 18))
    monkeypatch.setitem(block.SIZES, "state2048_short", block.Size(1, 18, 16, 32, 1))
    monkeypatch.setattr(block, "require_gpu", lambda: None)
    monkeypatch.setattr(timing, "event_samples", samples)
    names = [f"{kind}_{of}_bytes" for kind in ("peak", "baseline") for of in ("allocated", "reserved")]
    names += [f"peak_{of}_delta_bytes" for of in ("allocated", "reserved")]
    monkeypatch.setattr(timing, "peak_memory", lambda call: dict.fromkeys(names, 2**20))
    return clocked


def run(output: Path, *more: str) -> int:
    arguments = ["--cases", "state2048_short", "--eager", "--repeats", "1", "--jobs", "1", "--output", str(output)]
    return main(["bench", "block", *arguments, *more])


def test_schema(on_cpu: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "block.json"
    assert run(output) == 0
    result = json.loads(output.read_text())
    assert result["schema_version"] == 1
    (case,) = result["cases"]
    assert case["config"] == {"width": 16, "rnn_width": 32, "depth": 1}
    assert [row["architecture"] for row in case["rows"]] == ["rglru", "samu"]
    for row in case["rows"]:
        assert row.keys() >= FIELDS
        assert row["optimizer_step"].keys() == {
            "samples_ms", "median_ms", "mean_ms", "std_ms", "mad_ms", "minimum_ms", "maximum_ms",
        }  # fmt: skip
    # Two rounds, the second in reverse order.
    assert [clocked.block.mixer.__class__.__name__ for clocked in on_cpu] == ["RGLRU", "SAMU", "SAMU", "RGLRU"]
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out


def test_no_time_without_agreement(
    on_cpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients = block.Step.gradients

    def off(self: block.Step) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y, grads = gradients(self)
        return (y * 1.1 if self.block.conv.backend == "triton" else y), grads

    monkeypatch.setattr(block.Step, "gradients", off)
    assert run(tmp_path / "block.json") == 2
    assert "y is off by" in capsys.readouterr().err
    assert not on_cpu
    assert not (tmp_path / "block.json").exists()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(on_cpu: list[Any], tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMU_LM_FP8_EMULATE", "1")
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    output = tmp_path / "block.json"
    assert run(output, "--fp8", recipe) == 0
    result = json.loads(output.read_text())
    assert result["protocol"]["fp8"] == recipe
    assert all(isinstance(clocked.block.mlp.down, float8.Float8Linear) for clocked in on_cpu)
    for row in result["cases"][0]["rows"]:
        assert row["errors"]["mlp.down.weight"] > block.BOUNDS["other"]  # float8 was what was checked, too


def test_every_parameter_moves(on_cpu: list[Any]) -> None:
    """A step is forward, backward and update, of everything."""
    step = block.Step(block.SIZES["state2048_short"], "samu", False)
    before = {name: p.detach().clone() for name, p in step.block.named_parameters()}
    step()
    for name, p in step.block.named_parameters():
        assert not torch.equal(p, before[name]), name
    assert step.x.grad is not None
