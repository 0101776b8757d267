"""What train.py says and with which status it ends."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.data import LMDataModule
from samu_lm.training import run as run_module
from tests.training.entry import train_py
from tests.training.support import load, tiny_overrides, write_corpus


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["model.widht=5"], "error: model.widht=5: unknown key; did you mean model.width?"),
        (["modle=samu_tiny"], "error: modle=samu_tiny: unknown key; did you mean model?"),
        (["trainer.max_stepz=5"], "error: trainer.max_stepz=5: unknown key; did you mean trainer.max_steps?"),
        (["lr=1"], "error: lr=1: unknown key; did you mean optimizer.lr?"),
        (["~model.widht"], "error: model.widht=(nothing): unknown key; did you mean model.width?"),
        (["+model.width=3"], "error: +model.width=3: the key exists; drop the plus: model.width=3"),
        (
            ["model=samu_tinny"],
            "error: model=samu_tinny: no such choice; did you mean samu_tiny? choose from gated_delta_",
        ),
        (
            ["model.width=[1,2"],
            "error: model.width=[1,2: cannot be read (no viable alternative at input '[1,2'); check",
        ),
        (["+model.widht=5"], "error: model.widht=5: unknown key; did you mean width?"),
        (["model.width=${nope}"], "error: model.width=${nope}: refers to a config value that does not exist"),
        (["hydra.run.dir=${nope}"], "error: hydra.run.dir=${nope}: Interpolation key 'nope' not found; set it to a"),
        (["model.depth=two"], "error: model.depth=two: wrong type str; must be int"),
        (["resume=last"], "error: resume=last: no checkpoint in "),
        (["--config-name=nope"], "error: --config-name=nope: no such config file"),
    ],
)
def test_an_error_of_the_user_is_one_line_and_status_2(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def setup(self: LMDataModule, stage: str | None = None) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(LMDataModule, "setup", setup)
    folder = [] if arguments[0].startswith("hydra.") else [f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *arguments, *folder) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1


def test_any_other_exception_leaves_its_traceback_in_the_log_and_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(plan: object, module: object) -> None:
        raise RuntimeError("the accelerator fell off")

    monkeypatch.setattr(run_module, "fit", fit)
    arguments = [*tiny_overrides(write_corpus(tmp_path)), f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *arguments) == 1
    assert "RuntimeError: the accelerator fell off" in capsys.readouterr().err
    log = (tmp_path / "run" / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "RuntimeError: the accelerator fell off" in log


def test_success_is_status_0_and_the_folder_is_hydra_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path)
    arguments = [*tiny_overrides(corpus), f"hydra.run.dir={tmp_path}/run", "trainer.max_steps=4"]
    assert train_py(monkeypatch, *arguments) == 0
    run = tmp_path / "run"
    assert (run / ".hydra" / "overrides.yaml").is_file()
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert "step 4/4" in (run / "train.log").read_text()
    first = (run / ".hydra" / "config.yaml").read_text()
    # without the first command's overrides: the checkpoint's config holds
    longer = ["resume=last", "trainer.max_steps=5", f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *longer) == 0
    assert "step 5/5" in (run / "train.log").read_text()
    assert (run / ".hydra" / "config.yaml").read_text() == first
    assert (run / ".hydra" / "resume-1" / "overrides.yaml").is_file()
    capsys.readouterr()
    assert train_py(monkeypatch, "resume=last", "model=rglru_tiny", f"hydra.run.dir={run}") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: model.width=128: the checkpoint has model.width=16; drop the override")


def test_a_folder_that_became_read_only_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write in any folder, but not on a file system without writing."""

    def read_only(**arguments: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert train_py(monkeypatch, f"hydra.run.dir={run}", "resume=last") == 4
    assert capsys.readouterr().err == (
        f"error: hydra.run.dir={run}: cannot be written (Read-only file system); free space, or choose another folder\n"
    )
    assert not list(run.iterdir())


@pytest.mark.parametrize("name", ["metrics.csv", "results.json", "config.yaml"])
def test_a_full_disk_under_another_file_is_one_line_too_and_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The log of step 3, the outcome after the last step, the record before the first."""
    opened, count = io.open, 0

    def full(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        nonlocal count
        if name in str(file) and mode != "r" and ".hydra" not in str(file):
            count += 1
            if name != "metrics.csv" or count > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(file, mode, *args, **options)

    monkeypatch.setattr(io, "open", full)
    settings = ["callbacks.last.every_n_steps=1", "trainer.val_check_interval=50", f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *tiny_overrides(write_corpus(tmp_path)), *settings) == 4
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.endswith(
        ": cannot be written (No space left on device); checkpoints are as they were: free space, then resume=last\n"
    )
    assert err.count("\n") == 1
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    reached = load(last)["global_step"] if last.exists() else 0
    assert reached == {"metrics.csv": 2, "results.json": 6, "config.yaml": 0}[name]


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = torch.save

    def full_from_step_3(content: dict[str, Any], file: Any) -> None:
        if content["global_step"] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    monkeypatch.setattr(torch, "save", full_from_step_3)
    settings = ["callbacks.last.every_n_steps=1", "trainer.val_check_interval=50", f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *tiny_overrides(write_corpus(tmp_path)), *settings) == 4
    err = capsys.readouterr().err
    assert err.startswith(
        f"error: checkpoint={tmp_path}/run/checkpoints/last.ckpt: cannot be written (No space left on"
    )
    assert err.count("\n") == 1
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["last.ckpt"]
    assert load(folder / "last.ckpt")["global_step"] == 2
