"""Keeps the random generators' states with the checkpoint."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


def rng_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's generators as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Takes up states that `rng_state` gave; a CUDA state is left aside where there is no CUDA device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class RandomState(Callback):
    """Saves each rank's generators with a checkpoint and takes them up again when training goes on.

    Restored when training starts, after whatever a resumed run's set-up has drawn. A rank that the earlier part of the
    run did not have keeps its own seed.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before_validation = rng_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before_validation = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A run that is stopped inside a validation begins it anew.
        own = self._before_validation or rng_state()
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["rng"] = states

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get("rng", [])  # none where the earlier part ran without this callback
        self._loaded = states[trainer.global_rank] if trainer.global_rank < len(states) else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._loaded is not None:
            set_rng_state(self._loaded)
            self._loaded = None
