"""Signals and crashes of a real process, started as from a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from samu_lm.config import config_dir
from samu_lm.training import run as run_module
from samu_lm.training.loggers import read_rows
from samu_lm.training.loop import validation_owed
from tests.training.entry import train_py
from tests.training.support import load, tiny_overrides, write_corpus

ROOT = config_dir().parent
LONG = ["trainer.max_steps=100000", "schedule.total_steps=20", "trainer.val_check_interval=100000"]


class Run:
    """train.py in a process of its own."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, str(ROOT / "train.py"), *arguments, f"hydra.run.dir={run_dir}"]
        self.process = subprocess.Popen(command, cwd=run_dir.parent, stderr=subprocess.PIPE, text=True)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not reached():
            assert time.monotonic() < deadline
            if self.process.poll() is not None:
                assert self.process.stderr is not None
                raise AssertionError(self.process.stderr.read())
            time.sleep(0.01)

    def steps(self) -> int:
        rows = read_rows(self.run_dir / "logs" / "metrics.csv")
        return int(rows[-1]["step"]) if rows else 0

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=240)
        return self.process.returncode, err


class SendAt(Callback):
    """Sends a signal to this process in the middle of something."""

    def __init__(self, place: str, signum: signal.Signals) -> None:
        self.place, self.signum = place, signum

    def _send(self, place: str, now: bool = True) -> None:
        if place == self.place and now:
            self.place = ""
            os.kill(os.getpid(), self.signum)

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:  # the forward pass is done, the backward is not
        self._send("step", trainer.global_step == 2)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        self._send("validation", batch_idx == 1)

    def on_save_checkpoint(self, *args: Any) -> None:
        self._send("save")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize(
    ("place", "settings", "step"),
    [
        ("step", ["trainer.val_check_interval=5"], 3),
        ("validation", ["trainer.val_check_interval=2"], 2),
        ("save", ["trainer.val_check_interval=50", "callbacks.last.every_n_steps=3"], 4),
    ],
)
def test_stopped_in_the_middle_of(
    place: str,
    settings: list[str],
    step: int,
    signum: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step at hand is finished, a validation is cut short, a save completed; the checkpoint is the last step's."""
    build = run_module.build_trainer

    def with_sender(*arguments: Any) -> Any:
        trainer = build(*arguments)
        trainer.callbacks.insert(0, SendAt(place, signum))  # type: ignore[attr-defined]
        return trainer

    monkeypatch.setattr(run_module, "build_trainer", with_sender)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    tiny = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run", *settings]
    assert train_py(monkeypatch, *tiny) == 128 + signum
    checkpoint = load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == step
    assert validation_owed(checkpoint) is (place == "validation")
    assert not (tmp_path / "run" / "results.json").exists()
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_a_signal_after_the_last_step_lets_the_run_be_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SendAtEnd(Callback):
        def on_train_end(self, *args: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    build = run_module.build_trainer

    def with_sender(*arguments: Any) -> Any:
        trainer = build(*arguments)
        trainer.callbacks.insert(0, SendAtEnd())  # type: ignore[attr-defined]
        return trainer

    monkeypatch.setattr(run_module, "build_trainer", with_sender)
    tiny = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *tiny) == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "completed"
    assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 6


@pytest.mark.slow
def test_a_signal_from_outside_is_status_128_plus_its_number(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *tiny_overrides(write_corpus(tmp_path)), *LONG)
    run.wait_until(lambda: run.steps() >= 3)
    run.process.send_signal(signal.SIGINT)
    status, err = run.end()
    assert status == 130
    assert "SIGINT: saving the last step, then stopping" in err
    assert "Traceback" not in err
    checkpoint = load(run.run_dir / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == run.steps() >= 3


@pytest.mark.slow
def test_killed_while_it_saves_the_run_goes_on_from_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger embedding makes the file big enough to be caught half-written."""
    corpus = write_corpus(tmp_path)
    settings = [*tiny_overrides(corpus), *LONG, "model.width=256", "callbacks.last.every_n_steps=1"]
    run = Run(tmp_path / "run", *settings)
    folder = run.run_dir / "checkpoints"
    partial = folder / ".last.ckpt.partial"
    run.wait_until(lambda: (folder / "last.ckpt").exists() and partial.exists())
    run.process.kill()
    run.process.wait()
    before = load(folder / "last.ckpt")["global_step"]
    longer = [f"trainer.max_steps={before + 2}", "callbacks.last.every_n_steps=0"]
    assert train_py(monkeypatch, "resume=last", f"hydra.run.dir={run.run_dir}", *longer) == 0
    assert load(folder / "last.ckpt")["global_step"] == before + 2
    assert not partial.exists()
    steps = [int(row["step"]) for row in read_rows(run.run_dir / "logs" / "metrics.csv") if row["train/loss"]]
    assert steps == list(range(1, before + 3))


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """Data that never comes: the step at hand does not finish, so that only the second signal ends the process."""
    script = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from samu_lm.data.packing import RowPlan
rows = RowPlan.rows
count = [0]
def slow(self, *arguments):
    count[0] += 1
    if count[0] > 3:
        open({str(tmp_path / "waiting")!r}, "w").close()
        time.sleep(600)
    return rows(self, *arguments)
RowPlan.rows = slow
sys.argv[0] = {str(ROOT / "train.py")!r}
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    arguments = [*tiny_overrides(write_corpus(tmp_path)), *LONG, f"hydra.run.dir={tmp_path}/run"]
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM  # a shell shows 143
