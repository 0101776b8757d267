"""One plain line every few steps, for output that goes to a file."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from samu_lm.errors import ConfigError
from samu_lm.training.loop import is_logged

log = logging.getLogger(__name__)

_SHOWN = (
    ("train/loss", "loss {:.4f}"),
    ("lr", "lr {:.2e}"),
    ("grad_norm", "norm {:.3f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("mfu", "mfu {:.1%}"),
)


class PlainProgress(Callback):
    """Logs a line every few optimizer steps and after each validation; on a terminal the progress bar does it.

    Args:
        every_n_steps: optimizer steps between two lines, rounded up to a step whose metrics are logged.
        terminal: whether the output is a terminal; the callback then says nothing.
    """

    def __init__(self, every_n_steps: int = 50, terminal: bool = False) -> None:
        if every_n_steps < 1:
            raise ConfigError("callbacks.progress.every_n_steps", every_n_steps, "must be at least 1")
        self.every_n_steps, self.terminal = every_n_steps, terminal
        self._next = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._next = trainer.global_step - trainer.global_step % self.every_n_steps + self.every_n_steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.terminal or not trainer.is_global_zero or trainer.fit_loop._should_accumulate():
            return
        if not is_logged(trainer, step) or (step < self._next and step != trainer.max_steps):
            return
        self._next = step - step % self.every_n_steps + self.every_n_steps
        metrics = trainer.callback_metrics
        shown = [form.format(float(metrics[name])) for name, form in _SHOWN if name in metrics]
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        log.info("step %d%s  %s", step, total, "  ".join(shown))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.terminal or not trainer.is_global_zero or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        if "val/loss" in metrics:
            bits = f"  {float(metrics['val/bits_per_byte']):.4f} bits/byte" if "val/bits_per_byte" in metrics else ""
            log.info("step %d  validation loss %.4f%s", trainer.global_step, float(metrics["val/loss"]), bits)
