"""`train.py -m`: one folder, config and logger run a job, and a table at the end, also after a failed job."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from samu_lm.training import run as run_module
from samu_lm.training.callbacks import GracefulStop
from samu_lm.training.sweep import write_table
from tests.training.entry import train_py
from tests.training.support import tiny_overrides, write_corpus


def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> int:
    tiny = [*tiny_overrides(write_corpus(tmp_path)), "trainer.max_steps=3", f"hydra.sweep.dir={tmp_path}/sweep"]
    return train_py(monkeypatch, "-m", *tiny, *arguments)


def table(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "sweep" / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_folder_config_and_log_a_job_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, tmp_path, "model=samu_tiny,rglru_tiny", "seed=1,2") == 0
    folder = tmp_path / "sweep"
    jobs = sorted(p for p in folder.iterdir() if p.is_dir())
    assert [p.name for p in jobs] == ["0", "1", "2", "3"]
    wanted = [("samu", 1), ("samu", 2), ("rglru", 1), ("rglru", 2)]
    configs = [OmegaConf.load(p / "config.yaml") for p in jobs]
    assert [(c.model.mixer, c.seed) for c in configs] == wanted
    assert all((p / "logs" / "metrics.csv").is_file() for p in jobs)
    assert all("step 3/3" in (p / "train.log").read_text() for p in jobs)
    rows = table(tmp_path)
    assert [(row["model"], row["seed"], row["status"]) for row in rows] == [
        (f"{mixer}_tiny", str(seed), "completed") for mixer, seed in wanted
    ]
    results = [json.loads((p / "results.json").read_text()) for p in jobs]
    assert [float(row["val/loss"]) for row in rows] == [r["val/loss"] for r in results]
    assert len({r["val/loss"] for r in results}) == 4
    text = (folder / "results.md").read_text()
    assert text.startswith("| job | model | seed | status | global_step | train/loss | val/loss |")
    assert text in capsys.readouterr().out


def test_a_failed_job_keeps_its_traceback_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, tmp_path, "optimizer.lr=1e-3,-1,2e-3") == 2
    log = (tmp_path / "sweep" / "1" / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "optimizer.lr=-1: must be a positive number" in log
    rows = table(tmp_path)
    assert [row["status"] for row in rows] == ["completed", "failed", "completed"]
    assert [row["optimizer.lr"] for row in rows] == ["0.001", "-1", "0.002"]
    printed = capsys.readouterr()
    assert (tmp_path / "sweep" / "results.md").read_text() in printed.out
    assert "error: optimizer.lr=-1: must be a positive number" in printed.err


def test_an_exception_in_a_job_is_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = run_module.fit

    def fit_unless_seed_2(plan: run_module.Plan, module: run_module.TrainingModule) -> None:
        if plan.cfg.seed == 2:
            raise RuntimeError("the accelerator fell off")
        fit(plan, module)

    monkeypatch.setattr(run_module, "fit", fit_unless_seed_2)
    assert sweep(monkeypatch, tmp_path, "seed=1,2,3") == 1
    assert [row["status"] for row in table(tmp_path)] == ["completed", "failed", "completed"]
    assert "RuntimeError: the accelerator fell off" in (tmp_path / "sweep" / "1" / "train.log").read_text()


def test_a_signal_stops_the_whole_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(plan: run_module.Plan, module: run_module.TrainingModule) -> None:
        raise GracefulStop(2)

    monkeypatch.setattr(run_module, "fit", fit)
    assert sweep(monkeypatch, tmp_path, "seed=1,2,3") == 130
    assert [p.name for p in (tmp_path / "sweep").iterdir() if p.is_dir()] == ["0"]
    assert [row["status"] for row in table(tmp_path)] == ["stopped"]


def test_table_cells(tmp_path: Path) -> None:
    text = write_table(tmp_path, [{"job": "0", "x": 1.23456, "y": None}, {"job": "1", "x": "a|b", "y": 3}])
    assert text.splitlines() == ["| job | x | y |", "| --- | --- | --- |", "| 0 | 1.2346 |  |", "| 1 | a\\|b | 3 |"]
