"""``samu-lm bench decode``: decoded logits are the parallel pass's before anything is timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.benchmarks import decode, timing
from samu_lm.cli import main

TINY = {"vocab_size": 40, "width": 16, "rnn_width": 32, "depth": 2}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A small model without a graph; a step takes 2 ms on the clock."""
    clocked: list[Any] = []

    def samples(call: Any, repeats: int) -> list[float]:
        clocked.append(call)
        call()
        return [2.0] * repeats

    monkeypatch.setattr(decode, "DEVICE", "cpu")
    monkeypatch.setitem(decode.SIZES, "400m", TINY)
    monkeypatch.setattr(decode, "require_gpu", lambda: None)
    monkeypatch.setattr(decode.Decoder, "captured", lambda self: self.advance)
    monkeypatch.setattr(timing, "event_samples", samples)
    monkeypatch.setattr(timing, "copy_rate", lambda: 4.0)
    return clocked


def test_rows(on_cpu: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "decode.json"
    assert main(["bench", "decode", "--batch-sizes", "1", "3", "--repeats", "2", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["architecture"], row["batch"], row["tokens_per_second"]) for row in rows] == [
        (mixer, batch, 500.0 * batch) for mixer in ("rglru", "samu") for batch in (1, 3)
    ]
    model = decode.build(TINY, "rglru")
    assert model.blocks[0].mixer.a_param.dtype == torch.float32  # type: ignore[union-attr]
    assert model.embedding.weight.dtype == torch.bfloat16
    assert rows[0]["parameter_bytes"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert rows[0]["ceiling_steps_per_second"] == pytest.approx(4e12 / rows[0]["parameter_bytes"])
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out


def test_no_time_without_agreement(
    on_cpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state that is not carried on is found."""

    def forgetful(self: decode.Decoder) -> Callable[[], Any]:
        def advance() -> None:
            self.advance()
            for t in self.state.recurrent:
                t.zero_()

        return advance

    monkeypatch.setattr(decode.Decoder, "captured", forgetful)
    arguments = ["bench", "decode", "--architectures", "samu", "--output", str(tmp_path / "decode.json")]
    assert main(arguments) == 2
    assert "from the parallel pass's" in capsys.readouterr().err
    assert not on_cpu


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--batch-sizes", "1", "0"]])
def test_odd_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", *arguments]) == 2
    assert f"{arguments[0]}=0" in capsys.readouterr().err
