"""Logs the learning rate."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.loop import is_logged


class LearningRate(Callback):
    """Logs ``lr``, the rate with which an optimizer step is taken."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if is_logged(trainer, trainer.global_step + 1):
            pl_module.log("lr", torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))
