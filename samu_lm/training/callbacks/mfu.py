"""Logs the model-FLOPs utilisation where the device's peak is known."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.errors import ConfigError
from samu_lm.training.callbacks.throughput import Throughput
from samu_lm.training.loop import is_logged
from samu_lm.training.module import TrainingModule

log = logging.getLogger(__name__)

# Dense bfloat16 matrix FLOPs per second from the vendors' data sheets; the first name that the device's name contains.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2.25e15),
    ("GH200", 9.89e14),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("H800", 9.89e14),
    ("A100", 3.12e14),
    ("A800", 3.12e14),
    ("A30", 1.65e14),
    ("A10", 1.25e14),
    ("L40S", 3.62e14),
    ("L4", 1.21e14),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense bfloat16 peak of a device in FLOPs per second; None where it is not known or the run is not bfloat16."""
    if device.type != "cuda" or not precision.startswith("bf16"):
        return None
    words = torch.cuda.get_device_name(device)
    return next((peak for name, peak in PEAK_BF16_FLOPS if name in words), None)


class ModelFlopsUtilisation(Callback):
    """Logs ``mfu``: model FLOPs per second over the devices' peak, from 0 to 1.

    The model's FLOPs are those of its matrix products, forward and backward, without recomputation and without
    attention, which these models do not have; every token of a row counts, as for ``raw_tokens_per_second``. Where
    the peak is not known (a CPU, an unlisted GPU, float32) there is no ``mfu``, and the log says so once.
    """

    def __init__(self) -> None:
        self._peak: float | None = None
        self._flops_per_token = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(isinstance(callback, Throughput) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigError("callbacks.mfu", "set", "needs callbacks.throughput beside it")
        assert isinstance(pl_module, TrainingModule)
        self._peak = peak_flops(pl_module.device, str(trainer.precision))
        self._flops_per_token = pl_module.model.flops_per_token(training=True)  # type: ignore[operator]
        if self._peak is None:
            log.info("no mfu: the peak of %s in %s is not known", pl_module.device.type, trainer.precision)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._peak is None or trainer.fit_loop._should_accumulate():
            return
        if is_logged(trainer, trainer.global_step):
            tokens_per_second = float(trainer.callback_metrics["raw_tokens_per_second"])
            pl_module.log("mfu", tokens_per_second * self._flops_per_token / (self._peak * trainer.world_size))
