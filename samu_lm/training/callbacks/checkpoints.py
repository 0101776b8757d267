"""The checkpoints of a run: the last finished optimizer step, those before it, and the best validation loss so far."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from samu_lm.errors import ConfigError, SamuLMError
from samu_lm.training.checkpoint_io import keep_as, remove_partial_files, writing_checkpoint
from samu_lm.training.loop import ExactEpochLoop
from samu_lm.training.sharded import local_part

log = logging.getLogger(__name__)


class NonFiniteError(SamuLMError, RuntimeError):
    """A loss, a gradient or a weight holds NaN or infinity, or has jumped; the last good checkpoint is untouched."""

    exit_status: ClassVar[int] = 3


def first_non_finite(module: torch.nn.Module) -> str | None:
    """Name of the first parameter with NaN or infinity; of a sharded one, this rank looks at its own part."""
    named = [(name, local_part(p).detach()) for name, p in module.named_parameters()]
    named = [(name, tensor) for name, tensor in named if tensor.numel()]
    largest = torch.stack([norm.float() for norm in torch._foreach_norm([t for _, t in named], float("inf"))])
    if torch.isfinite(largest).all():
        return None
    return next(name for (name, _), norm in zip(named, largest.tolist(), strict=True) if not abs(norm) < float("inf"))


class _FolderCheckpoint(Checkpoint):
    """A file in the run's ``checkpoints`` folder; what an earlier crash left half-written there is deleted."""

    def __init__(self, filename: str, run_dir: str) -> None:
        self.path = Path(run_dir).absolute() / "checkpoints" / filename

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and self.path.parent.is_dir():
            for leftover in remove_partial_files(self.path.parent):
                log.warning("removed %s, which an interrupted save had left", leftover)

    def write(self, trainer: pl.Trainer) -> None:
        """Writes the file.

        Raises:
            NonFiniteError: a weight is not finite; nothing was written.
            CheckpointWriteError: the file cannot be written.
        """
        bad = first_non_finite(trainer.lightning_module)
        found = torch.tensor(bad is not None, device=trainer.strategy.root_device, dtype=torch.int32)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        if found:
            name = bad or "a weight of another rank"
            raise NonFiniteError(
                f"step {trainer.global_step}: {name} holds NaN or infinity; {self.path} is not written, a checkpoint "
                "from before stays as it is"
            )
        trainer.save_checkpoint(self.path)


class LastCheckpoint(_FolderCheckpoint):
    """Writes ``checkpoints/last.ckpt`` every few optimizer steps and when training ends.

    Args:
        every_n_steps: optimizer steps between two writes; 0 writes at the end only.
        keep: checkpoints to keep. With more than 1 each also has a name with its step, ``step-N.ckpt``; the newest of
            them is ``last.ckpt`` itself (a second name of the same file, not a copy).
        run_dir: the run's folder.
    """

    def __init__(self, every_n_steps: int = 500, keep: int = 1, run_dir: str = ".") -> None:
        super().__init__("last.ckpt", run_dir)
        if every_n_steps < 0:
            raise ConfigError(
                "callbacks.last.every_n_steps", every_n_steps, "must be at least 1, or 0: at the end only"
            )
        if keep < 1:
            raise ConfigError("callbacks.last.keep", keep, "must be at least 1")
        self.every_n_steps, self.keep = every_n_steps, keep
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
            self.write(trainer)
            self._saved = situation
            if self.keep > 1 and trainer.is_global_zero:
                self._keep(trainer.global_step)

    def _keep(self, step: int) -> None:
        keep_as(self.path, self.path.with_name(f"step-{step}.ckpt"))
        numbered = [
            (int(m[1]), p) for p in self.path.parent.iterdir() if (m := re.fullmatch(r"step-(\d+)\.ckpt", p.name))
        ]
        with writing_checkpoint(self.path):
            for _, path in sorted(numbered)[: -self.keep]:
                path.unlink()
            remove_partial_files(self.path.parent)


class BestCheckpoint(_FolderCheckpoint):
    """Writes ``checkpoints/best.ckpt`` after each validation whose loss is the lowest so far.

    Where a run goes on in a folder without the file, the lowest so far is that of this folder.

    Args:
        monitor: metric to minimise.
        run_dir: the run's folder.
    """

    def __init__(self, monitor: str = "val/loss", run_dir: str = ".") -> None:
        super().__init__("best.ckpt", run_dir)
        self.monitor = monitor
        self.best: float | None = None
        self.best_step: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        there = trainer.strategy.broadcast(self.path.exists())  # ranks on other machines may not see the folder
        if self.best is not None and not there:
            log.info("%s does not exist: the next validation is the best so far", self.path)
            self.best = self.best_step = None

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
            self.write(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
