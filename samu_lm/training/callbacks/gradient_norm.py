"""Logs the gradient's norm."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.gradients import gradient_norms
from samu_lm.training.loop import is_logged


class GradientNorm(Callback):
    """Logs ``grad_norm``, the Euclidean norm of a step's whole gradient before clipping."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if is_logged(trainer, trainer.global_step + 1):
            norms = gradient_norms(pl_module)
            pl_module.log("grad_norm", torch.linalg.vector_norm(torch.stack(list(norms.values()))))
