"""``samu-lm bench decode``: decoded logits are the parallel pass's before anything is timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.benchmarks import decode, decode_plans, timing
from samu_lm.cli import main
from samu_lm.ops.decode import Plan

TINY = {"vocab_size": 40, "width": 16, "rnn_width": 32, "depth": 2}


# Few programs for the interpreter.
PLAN = {name: [64, 4] for name in ("input", "output", "mlp_input", "mlp_output", "logits")}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A small model without a graph; a step takes 2 ms on the clock."""
    clocked: list[Any] = []

    def samples(call: Any, repeats: int) -> list[float]:
        clocked.append(call)
        call()
        return [2.0] * repeats

    monkeypatch.setattr(decode, "DEVICE", "cpu")
    monkeypatch.setattr(decode, "CHECKED", 5)
    monkeypatch.setattr(decode, "default_plan", lambda mixer, rows=1: Plan().changed(PLAN))
    monkeypatch.setitem(decode.SIZES, "400m", TINY)
    monkeypatch.setattr(decode, "require_gpu", lambda: None)
    monkeypatch.setattr(decode, "start", lambda decoder: decoder.advance)
    monkeypatch.setattr(timing, "event_samples", samples)
    monkeypatch.setattr(timing, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(timing, "kernel_times", lambda call: [("some_kernel", 0.25)] * 13)
    return clocked


def test_rows(on_cpu: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "decode.json"
    assert main(["bench", "decode", "--batch-sizes", "1", "3", "--repeats", "2", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    rows = result["rows"]
    assert [(row["architecture"], row["batch"], row["tokens_per_second"]) for row in rows] == [
        (mixer, batch, 500.0 * batch) for mixer in ("rglru", "samu") for batch in (1, 3)
    ]
    model = decode.build(TINY, "rglru")
    assert model.blocks[0].mixer.a_param.dtype == torch.float32  # type: ignore[union-attr]
    assert model.embedding.weight.dtype == torch.bfloat16
    assert rows[0]["parameter_bytes"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert rows[0]["ceiling_steps_per_second"] == pytest.approx(4e12 / rows[0]["parameter_bytes"])
    assert result["parts_ms"]["samu"] == {"embed": 0.25, "logits": 0.25, "choose": 0.25} | dict.fromkeys(
        ("input", "samu", "output", "mlp_input", "mlp_output"), 0.5
    )
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out


def test_no_time_without_agreement(
    on_cpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state that is not carried on is found."""

    def forgetful(decoder: decode.Decoder) -> Callable[[], Any]:
        def advance() -> None:
            decoder.advance()
            decoder.reset()

        return advance

    monkeypatch.setattr(decode, "start", forgetful)
    arguments = ["bench", "decode", "--architectures", "samu", "--output", str(tmp_path / "decode.json")]
    assert main(arguments) == 2
    assert "from the parallel pass's" in capsys.readouterr().err
    assert not on_cpu


def test_candidates(on_cpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest that runs is measured; one that cannot run is recorded as such."""
    times = {"output": 1.5, "mlp_output": 1.0, "input": 3.0}

    def samples(call: Any, repeats: int) -> list[float]:
        plan = call.__self__.plan
        if plan.input.size == 32:
            raise RuntimeError("out of registers")
        slowest = 2.0 if plan.overlap else 2.5
        return [min([slowest] + [time for name, time in times.items() if getattr(plan, name).size == 128])] * repeats

    monkeypatch.setattr(timing, "event_samples", samples)
    monkeypatch.setattr(decode_plans, "SEARCHED", {"mlp_output": [[128, 4]], "samu": [[4, 1]], "input": [[32, 1]]})
    candidates, output = tmp_path / "mine.json", tmp_path / "decode.json"
    candidates.write_text(json.dumps({"wide": PLAN | {"output": [128, 4]}}))
    arguments = ["--architectures", "rglru", "--candidates", str(candidates), "--search", "--output", str(output)]
    assert main(["bench", "decode", *arguments]) == 0
    result = json.loads(output.read_text())
    tried = {row["name"]: row.get("median_ms", row.get("failed")) for row in result["candidates"]}
    assert tried == {
        "no overlap": 2.5,
        "default": 2.0,
        "wide": 1.5,
        "mlp_output [128, 4]": 1.0,
        "input [32, 1]": "RuntimeError: out of registers",
    }
    assert result["rows"][0]["plan"] == Plan().changed(PLAN | {"output": [128, 4], "mlp_output": [128, 4]}).as_dict()


@pytest.mark.parametrize("content", ["[1]", "{", '{"mine": {"output": [3, 4]}}', '{"mine": {"outputs": [4, 4]}}'])
def test_odd_candidates(content: str, tmp_path: Path, on_cpu: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    candidates = tmp_path / "mine.json"
    candidates.write_text(content)
    assert main(["bench", "decode", "--candidates", str(candidates), "--output", str(tmp_path / "decode.json")]) == 2
    assert f"--candidates={candidates}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--batch-sizes", "1", "0"]])
def test_odd_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", *arguments]) == 2
    assert f"{arguments[0]}=0" in capsys.readouterr().err
