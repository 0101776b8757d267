"""Logs the memory in use."""

from __future__ import annotations

import resource
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.loop import is_logged

GIB = 2**30


def peak_rss_bytes() -> int:
    """The process's largest resident set so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Memory(Callback):
    """Logs peaks in GiB since the run began: ``memory/allocated`` and ``memory/reserved`` of the CUDA allocator on a
    GPU, ``memory/rss`` (this process, without the loader's workers) on a CPU."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate() or not is_logged(trainer, trainer.global_step):
            return
        if pl_module.device.type == "cuda":
            pl_module.log("memory/allocated", torch.cuda.max_memory_allocated(pl_module.device) / GIB)
            pl_module.log("memory/reserved", torch.cuda.max_memory_reserved(pl_module.device) / GIB)
        else:
            pl_module.log("memory/rss", peak_rss_bytes() / GIB)
