"""Stops other than a signal in mid-training: before the first step, in a sweep, at trainer.max_time, in a SLURM job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from samu_lm.data import LMDataModule
from samu_lm.errors import ConfigError
from samu_lm.training import run as run_module
from samu_lm.training.callbacks import GracefulStop, StopOnSignal
from samu_lm.training.run import run
from tests.training.entry import train_py
from tests.training.support import load, tiny_config, tiny_overrides, write_corpus

ENDLESS = ["trainer.max_steps=100000", "schedule.total_steps=20", "trainer.val_check_interval=100000"]
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SendIn(Callback):
    """Sends a signal to this process in the hook of that name, at each call."""

    def __init__(self, hook: str, signum: signal.Signals) -> None:
        setattr(self, hook, lambda *args, **kwargs: os.kill(os.getpid(), signum))


def add_callback(monkeypatch: pytest.MonkeyPatch, callback: Callback) -> None:
    """Puts a callback before the others of every run."""
    build = run_module.build_trainer

    def with_callback(*arguments: Any) -> Any:
        trainer = build(*arguments)
        trainer.callbacks.insert(0, callback)  # type: ignore[attr-defined]
        return trainer

    monkeypatch.setattr(run_module, "build_trainer", with_callback)


@pytest.mark.parametrize(
    ("hook", "signum"),
    [
        ("setup", signal.SIGINT),
        ("on_fit_start", signal.SIGINT),
        ("on_train_start", signal.SIGINT),
        ("setup", signal.SIGTERM),
        ("on_train_start", signal.SIGUSR1),
    ],
)
def test_before_the_first_step(
    hook: str,
    signum: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The status is the signal's, nothing is saved, and the handlers are those of before."""
    add_callback(monkeypatch, SendIn(hook, signum))
    before = [signal.getsignal(s) for s in HANDLED]
    arguments = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *arguments) == 128 + signum
    assert f"{signum.name}: stopping" in capfd.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [signal.getsignal(s) for s in HANDLED] == before


def test_while_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LMDataModule, "setup", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    arguments = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *arguments) == 143


def test_ctrl_c_while_a_config_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "make_plan", interrupted)
    arguments = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *arguments) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_in_a_job_stops_the_sweep_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_callback(monkeypatch, SendIn("on_before_zero_grad", signal.SIGINT))
    tiny = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.sweep.dir={tmp_path}/sweep", "seed=1,2,3"]
    assert train_py(monkeypatch, "-m", *tiny) == 130
    assert [p.name for p in (tmp_path / "sweep").iterdir() if p.is_dir()] == ["0"]
    assert load(tmp_path / "sweep" / "0" / "checkpoints" / "last.ckpt")["global_step"] == 1


def test_ctrl_c_without_the_callback_for_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning ends such a run itself; nothing is saved, the status is that of Ctrl-C."""
    add_callback(monkeypatch, SendIn("on_before_zero_grad", signal.SIGINT))
    arguments = [*tiny_overrides(write_corpus(tmp_path)), "~callbacks.stop", f"hydra.run.dir={tmp_path}/run"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
    try:
        assert train_py(monkeypatch, *arguments) == 130
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, signal.SIGTERM)])
def test_a_forked_process_says_nothing_and_leaves_the_save_to_its_parent(
    signum: signal.Signals, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = StopOnSignal()
    with callback.installed(pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")):
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signum)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == status
        assert signum.name not in capfd.readouterr().err
        with pytest.raises(GracefulStop):
            os.kill(os.getpid(), signum)
    assert f"{signum.name}: stopping" in capfd.readouterr().err


class TestMaxTime:
    def test_stops_with_a_checkpoint_a_status_of_its_own_and_can_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiny = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run", *ENDLESS]
        assert train_py(monkeypatch, *tiny, "trainer.max_time=00:00:00:01") == 124
        folder = tmp_path / "run"
        step = load(folder / "checkpoints" / "last.ckpt")["global_step"]
        assert step > 1
        assert not (folder / "results.json").exists()
        text = (folder / "train.log").read_text()
        assert f"trainer.max_time is reached: stopped at step {step}; resume=last goes on from" in text
        # the time is that of one process: the run goes on although it has had its second
        longer = ["resume=last", f"trainer.max_steps={step + 2}", "trainer.max_time={minutes: 60}"]
        assert train_py(monkeypatch, *longer, f"hydra.run.dir={folder}") == 0
        assert load(folder / "checkpoints" / "last.ckpt")["global_step"] == step + 2

    def test_says_that_nothing_is_saved_without_the_callback_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiny = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run", *ENDLESS]
        assert train_py(monkeypatch, *tiny, "trainer.max_time=00:00:00:01", "~callbacks.last") == 124
        assert not (tmp_path / "run" / "checkpoints").exists()
        text = (tmp_path / "run" / "train.log").read_text()
        assert "trainer.max_time is reached: stopped at step " in text
        assert ", which is not saved: the config has no callbacks.last" in text

    def test_a_run_that_is_completed_in_time_is(self, tmp_path: Path) -> None:
        cfg = tiny_config(write_corpus(tmp_path), "trainer.max_time=00:00:30:00")
        assert run(cfg, tmp_path / "run")["status"] == "completed"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (["trainer.max_time=soon"], r"^trainer\.max_time=soon: must be DD:HH:MM:SS"),
            (["trainer.max_time={fortnights: 1}"], r"^trainer\.max_time=\{'fortnights': 1\}: must be DD:HH:MM:SS"),
            (["trainer.max_time={hours: 1000000000000}"], r"^trainer\.max_time=\{'hours': 1000000000000\}: must be DD"),
            (["trainer.max_time=00:00:00:00"], r"^trainer\.max_time=00:00:00:00: must be longer than no time"),
            (
                ["trainer.max_time=00:01:00:00", "~callbacks.stop"],
                r"^trainer\.max_time=00:01:00:00: needs callbacks\.stop",
            ),
        ],
    )
    def test_refused(self, tmp_path: Path, settings: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            run(tiny_config(write_corpus(tmp_path), *settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestSlurm:
    """A job of srun, as its variables say; `scontrol` is a script that notes how it was called."""

    @pytest.fixture(autouse=True)
    def job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        scontrol = tmp_path / "bin" / "scontrol"
        scontrol.parent.mkdir()
        scontrol.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/called\n')
        scontrol.chmod(0o755)
        monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
        variables = {"JOB_ID": "77", "JOB_NAME": "train", "NTASKS": "1", "NTASKS_PER_NODE": "1"}
        for name, value in {**variables, "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    def stopped_by(self, signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
        """The calls of scontrol during a run that gets the signal in its first step."""
        add_callback(monkeypatch, SendIn("on_before_zero_grad", signum))
        tiny = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run", "resume=auto", *more]
        assert train_py(monkeypatch, *tiny) == 128 + signum
        assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 1
        assert not list(tmp_path.rglob("hpc_ckpt*"))  # Lightning's own checkpoint of such a moment
        called = tmp_path / "called"
        return called.read_text() if called.exists() else ""

    def test_the_announced_end_puts_the_job_back_and_it_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.stopped_by(signal.SIGUSR1, tmp_path, monkeypatch) == "requeue 77\n"
        assert "the job 77 is back in the queue" in (tmp_path / "run" / "train.log").read_text()
        assert self.again(tmp_path, monkeypatch) == 0  # the same command, as SLURM gives it
        assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 6

    @staticmethod
    def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.undo()
        tiny = [*tiny_overrides(tmp_path / "corpus.txt"), f"hydra.run.dir={tmp_path}/run", "resume=auto"]
        return train_py(monkeypatch, *tiny)

    def test_an_array_s_task(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
        assert self.stopped_by(signal.SIGUSR1, tmp_path, monkeypatch) == "requeue 70_3\n"

    def test_a_switched_off_requeue(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.stopped_by(signal.SIGUSR1, tmp_path, monkeypatch, "callbacks.stop.requeue=false") == ""

    def test_a_cancelled_job_is_not_put_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.stopped_by(signal.SIGTERM, tmp_path, monkeypatch) == ""

    def test_a_failure_to_is_in_the_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho slurm is away >&2\nexit 1\n")
        self.stopped_by(signal.SIGUSR1, tmp_path, monkeypatch)
        text = (tmp_path / "run" / "train.log").read_text()
        assert "the job 77 is not put back in the queue: slurm is away; submit it again with resume=last" in text
