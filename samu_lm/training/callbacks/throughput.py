"""Logs the training speed."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from samu_lm.training.loop import is_logged
from samu_lm.training.module import TrainingModule


class Throughput(Callback):
    """Logs speeds since the last logged step, over all ranks; time spent in validation does not count.

    ``tokens_per_second`` counts targets, the tokens that train; ``raw_tokens_per_second`` counts every token of every
    row, padding included, which is what the hardware works through. Waiting for data and writing checkpoints count.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since = 0.0
        self._targets = self._row_tokens = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_window(pl_module)
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate() or not is_logged(trainer, trainer.global_step):
            return
        assert isinstance(pl_module, TrainingModule)
        targets = pl_module.targets_seen - self._targets  # waits for the device
        now = time.perf_counter()
        seconds = self._seconds + now - self._since
        raw = (pl_module.row_tokens_seen - self._row_tokens) / seconds
        pl_module.log("tokens_per_second", targets / seconds, prog_bar=True)
        pl_module.log("raw_tokens_per_second", raw)
        self._start_window(pl_module)
        self._since = now

    def _start_window(self, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._targets, self._row_tokens = pl_module.targets_seen, pl_module.row_tokens_seen
        self._seconds = 0.0
