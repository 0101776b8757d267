"""``samu-lm bench step``: agreement before times, sizes of the presets, and parts that add up to the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from samu_lm.benchmarks import step, timing
from samu_lm.cli import main

ROOT = Path(__file__).parents[2]
TINY = {"vocab_size": 40, "width": 16, "rnn_width": 32, "depth": 2}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A small model, interpreted; a step takes 20 ms on the clock, a part 1 ms."""
    clocked: list[Any] = []

    def samples(call: Any, repeats: int, warmup: int) -> tuple[list[float], dict[str, int]]:
        clocked.append(call)
        call()
        return [20.0] * repeats, {"peak_allocated_bytes": 2**20}

    def part(call: Any) -> float:
        call()
        return 1.0

    monkeypatch.setattr(step, "DEVICE", "cpu")
    monkeypatch.setattr(step, "CHECKED", (1, 12, 1))
    monkeypatch.setitem(step.SIZES, "400m", TINY)
    monkeypatch.setattr(step, "require_gpu", lambda: None)
    monkeypatch.setattr(timing, "samples_and_peak", samples)
    monkeypatch.setattr(timing, "queued_median", part)
    return clocked


def run(output: Path, *arguments: str) -> int:
    common = ["--lengths", "12", "--tokens", "24", "--eager", "--repeats", "2", "--output", str(output)]
    return main(["bench", "step", *common, *arguments])


def test_rows_and_parts(on_cpu: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "step.json"
    assert run(output) == 0
    result = json.loads(output.read_text())
    assert [row["architecture"] for row in result["rows"]] == ["rglru", "samu"]
    for row, clocked in zip(result["rows"], on_cpu, strict=True):
        assert (row["rows"], row["length"]) == (2, 12)
        assert row["tokens_per_second"] == pytest.approx(24 / 0.020)
        flops = 24 * clocked.model.flops_per_token()
        assert row["utilisation"] == pytest.approx(flops / 0.020 / 990e12)
        parts = row["parts_ms"]
        assert parts.keys() == {"projections", "convolution", "mixer", "mlp", "loss", "optimizer", "rest"}
        assert parts["mixer"] == 2.0  # two blocks
        assert sum(parts.values()) == pytest.approx(row["median_ms"])
    written = output.with_suffix(".md").read_text()
    assert written in capsys.readouterr().out
    assert "| samu | 2 x 12 | 2.0 (10%) |" in written


def test_no_time_without_agreement(
    on_cpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients = step.TrainingStep.gradients

    def off(self: step.TrainingStep) -> torch.Tensor:
        loss = gradients(self)
        return loss * 1.01 if self.model.blocks[0].conv.backend == "triton" else loss  # type: ignore[union-attr]

    monkeypatch.setattr(step.TrainingStep, "gradients", off)
    assert run(tmp_path / "step.json", "--architectures", "samu") == 2
    assert "differs from the reference's" in capsys.readouterr().err
    assert not on_cpu


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(on_cpu: list[Any], tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMU_LM_FP8_EMULATE", "1")
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    monkeypatch.setattr(step, "CHECKED", (2, 48, 1))  # the loss of a few tokens says little
    output = tmp_path / "step.json"
    assert run(output, "--tokens", "48", "--fp8", recipe) == 0
    result = json.loads(output.read_text())
    assert result["protocol"]["fp8"] == recipe
    for row, clocked in zip(result["rows"], on_cpu, strict=True):
        assert isinstance(clocked.model.blocks[0].linear_x, float8.Float8Linear)
        assert row["errors"]["gradients"] > step.BOUNDS["gradients"]  # float8 was what was checked, too


def test_float8_needs_a_gpu(on_cpu: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "step.json", "--tokens", "48", "--fp8", "rowwise") == 2
    assert "--fp8=rowwise: needs a GPU of compute capability 8.9" in capsys.readouterr().err
    assert not on_cpu


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--lengths", "7"], "--lengths=7"),
        (["--tokens", "0"], "--tokens=0"),
        (["--repeats", "0"], "--repeats=0"),
        (["--tokens", "40", "--lengths", "20", "--fp8", "rowwise"], "--tokens=40: must be a multiple of 16"),
    ],
)
def test_odd_arguments(arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *arguments]) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(step.SIZES))
def test_sizes_are_those_of_the_presets(name: str) -> None:
    for mixer in ("samu", "rglru"):
        config = yaml.safe_load((ROOT / "configs" / "model" / f"{mixer}_{name}.yaml").read_text())
        assert {key: config[key] for key in TINY} == step.SIZES[name]
