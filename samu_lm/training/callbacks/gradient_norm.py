"""Logs the gradient's norm and refuses a gradient that is not finite."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.loop import is_logged


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity; weights and optimizer are as the last good step left them."""


class GradientNorm(Callback):
    """Logs ``grad_norm``, the Euclidean norm of a step's whole gradient before clipping, and stops at a bad one."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raises:
        NonFiniteGradientError: before the optimizer has touched a weight; names the step and the first bad tensor.
        """
        norm = torch.nn.utils.get_total_norm(p.grad for p in pl_module.parameters() if p.grad is not None)
        if is_logged(trainer, trainer.global_step + 1):
            pl_module.log("grad_norm", norm)
        if torch.isfinite(norm):
            return
        step = trainer.global_step + 1
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                count = int((~torch.isfinite(parameter.grad)).sum())
                raise NonFiniteGradientError(
                    f"step {step}: the gradient of {name} has {count} of {parameter.grad.numel()} values that are NaN "
                    "or infinite; the weights are those of the step before"
                )
        raise NonFiniteGradientError(
            f"step {step}: the gradient's norm overflows float32 although each value is finite; the weights are those "
            "of the step before"
        )
