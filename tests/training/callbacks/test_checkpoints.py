from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.data import tokenizer_from_state
from samu_lm.errors import ConfigError
from samu_lm.training.callbacks import BestCheckpoint, LastCheckpoint
from samu_lm.training.loggers import read_rows
from tests.training.support import load, tiny_config, train_tiny, write_corpus


class Saves(Callback):
    """Notes the step of every write of each file."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {"last.ckpt": [], "best.ckpt": []}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        write = trainer.save_checkpoint

        def noted(path: Path, *args: Any) -> None:
            self.steps[Path(path).name].append(trainer.global_step)
            write(path, *args)

        trainer.save_checkpoint = noted


def test_last_every_few_steps_and_best_by_validation_loss(tmp_path: Path) -> None:
    saves = Saves()
    settings = ["callbacks.last.every_n_steps=2", "trainer.max_steps=7", "trainer.val_check_interval=3"]
    train_tiny(tiny_config(write_corpus(tmp_path), *settings), tmp_path / "run", saves)
    rows = read_rows(tmp_path / "run" / "logs" / "metrics.csv")
    losses = {int(row["step"]): float(row["val/loss"]) for row in rows if row["val/loss"]}
    assert list(losses) == [3, 6, 7]
    improving = [step for step in losses if losses[step] == min(v for s, v in losses.items() if s <= step)]
    assert saves.steps == {"last.ckpt": [2, 4, 6, 7], "best.ckpt": improving}
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert load(tmp_path / "run" / "checkpoints" / "best.ckpt")["global_step"] == improving[-1]


def test_content(tmp_path: Path) -> None:
    cfg = tiny_config(write_corpus(tmp_path))
    done = train_tiny(cfg, tmp_path / "run")
    content = load(tmp_path / "run" / "checkpoints" / "last.ckpt")  # weights_only
    assert content["samu_lm"]["format"] == 1
    assert content["samu_lm"]["config"]["model"]["width"] == 16
    assert tokenizer_from_state(content["samu_lm"]["tokenizer"]).vocab_size == 258
    assert content["samu_lm"]["targets_seen"] == done.module.targets_seen > 0
    assert content["state_dict"].keys() == {f"model.{name}" for name in done.module.model.state_dict()}
    assert content["LMDataModule"]["rows_consumed"] == 12


def test_a_nan_is_never_best(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = BestCheckpoint()
    saved: list[float] = []

    class Trainer:
        sanity_checking, state, global_step = False, type("S", (), {"fn": "fit"}), 1
        callback_metrics: Mapping[str, torch.Tensor]

    def write(trainer: Any) -> None:
        saved.append(float(trainer.callback_metrics["val/loss"]))

    monkeypatch.setattr(callback, "write", write)
    trainer: Any = Trainer()
    for value in (2.0, float("nan"), 3.0, 1.0, 1.0):
        trainer.callback_metrics = {"val/loss": torch.tensor(value)}
        callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
    assert saved == [2.0, 1.0]


def test_leftovers_of_a_crash_are_removed_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / ".last.ckpt.partial").write_bytes(b"PK")
    train_tiny(tiny_config(write_corpus(tmp_path), "trainer.max_steps=3"), tmp_path / "run")
    assert sorted(p.name for p in folder.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_refuses_a_negative_interval() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\.last\.every_n_steps=-1: must be at least 1"):
        LastCheckpoint(every_n_steps=-1)
