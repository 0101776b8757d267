"""The two checkpoint files of a run: the last finished optimizer step, and the best validation loss so far."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from samu_lm.errors import ConfigError
from samu_lm.training.checkpoint_io import remove_partial_files
from samu_lm.training.loop import ExactEpochLoop

log = logging.getLogger(__name__)


class _FolderCheckpoint(Checkpoint):
    """A file in the run's ``checkpoints`` folder; what an earlier crash left half-written there is deleted."""

    def __init__(self, filename: str, run_dir: str) -> None:
        self.path = Path(run_dir).absolute() / "checkpoints" / filename

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and self.path.parent.is_dir():
            for leftover in remove_partial_files(self.path.parent):
                log.warning("removed %s, which an interrupted save had left", leftover)


class LastCheckpoint(_FolderCheckpoint):
    """Writes ``checkpoints/last.ckpt`` every few optimizer steps and when training ends.

    Args:
        every_n_steps: optimizer steps between two writes; 0 writes at the end only.
        run_dir: the run's folder.
    """

    def __init__(self, every_n_steps: int = 500, run_dir: str = ".") -> None:
        super().__init__("last.ckpt", run_dir)
        if every_n_steps < 0:
            raise ConfigError(
                "callbacks.last.every_n_steps", every_n_steps, "must be at least 1, or 0: at the end only"
            )
        self.every_n_steps = every_n_steps
        self._saved: tuple[int, bool] | None = None

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Writes the file unless it already holds this step and knows whether the step was validated."""
        loop = trainer.fit_loop.epoch_loop
        situation = (trainer.global_step, isinstance(loop, ExactEpochLoop) and loop.validation_owed)
        if self._saved != situation:
            trainer.save_checkpoint(self.path)
            self._saved = situation


class BestCheckpoint(_FolderCheckpoint):
    """Writes ``checkpoints/best.ckpt`` after each validation whose loss is the lowest so far.

    Args:
        monitor: metric to minimise.
        run_dir: the run's folder.
    """

    def __init__(self, monitor: str = "val/loss", run_dir: str = ".") -> None:
        super().__init__("best.ckpt", run_dir)
        self.monitor = monitor
        self.best: float | None = None
        self.best_step: int | None = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics
        if trainer.sanity_checking or trainer.state.fn != "fit" or "val/loss" not in metrics:
            return
        if self.monitor not in metrics:
            remedy = f"no such metric; choose one of {', '.join(sorted(name for name in metrics if 'val/' in name))}"
            raise ConfigError("callbacks.best.monitor", self.monitor, remedy)
        value = float(metrics[self.monitor])
        if self.best is None or value < self.best:  # a NaN is never less
            self.best, self.best_step = value, trainer.global_step
            trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
