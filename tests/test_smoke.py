"""``experiment=smoke``: train, evaluate and sample, as one person would, in under a minute on two cores."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).resolve().parent.parent


def _entry(script: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    GlobalHydra.instance().clear()
    runpy.run_path(str(ROOT / script), run_name="__main__")


def test_the_whole_path_in_under_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.perf_counter()
    _entry("train.py", "experiment=smoke", "hydra.run.dir=run", monkeypatch=monkeypatch)
    checkpoint = "checkpoint=run/checkpoints/last.ckpt"
    _entry("eval.py", checkpoint, "hydra.run.dir=evaluation", "device=cpu", monkeypatch=monkeypatch)
    sample = ["prompt=def ", "max_new_tokens=20", "hydra.run.dir=sample", "device=cpu"]
    _entry("eval.py", checkpoint, *sample, monkeypatch=monkeypatch)
    assert time.perf_counter() - began < 60
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["status"] == "completed"
    assert results["global_step"] == 20
    outcome = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert outcome["targets"] > 0
    for made in ("run/curve.png", "evaluation/loss_by_position.png", "sample/samples.json"):
        assert (tmp_path / made).stat().st_size > 0
