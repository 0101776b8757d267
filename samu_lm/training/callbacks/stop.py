"""Stops a run on SIGTERM, SIGUSR1 or SIGINT with a checkpoint of its last optimizer step."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.callbacks.checkpoints import LastCheckpoint

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class GracefulStop(SystemExit):
    """Ends the process with status 128 + signal. No `Exception`: a launcher of many jobs must not go on to the next."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class StopOnSignal(Callback):
    """Finishes the optimizer step (or validation batch, or write) at hand, saves ``last.ckpt`` and ends the process.

    The checkpoint is that of the last finished optimizer step; a validation that the signal cut short is done again
    when the run is resumed. A second signal ends the process at once. With several ranks a signal to any of them stops
    all at the same step.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._signum = 0
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        # The system's own action, so that a second signal ends the process even where Python does not get to run.
        for s in SIGNALS:
            signal.signal(s, signal.SIG_DFL)
        # Not by the logger: the signal may have come while it was writing.
        os.write(
            2, f"{signal.Signals(signum).name}: saving the last step, then stopping; again to stop at once\n".encode()
        )

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_if_asked(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._stop_if_asked(trainer, pl_module)

    def _stop_if_asked(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signum = self._signum
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if trainer.world_size > 1:
            seen = torch.tensor(signum, device=pl_module.device)
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
            signum = int(seen)
        if not signum:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LastCheckpoint):
                callback.save(trainer)
                if trainer.is_global_zero:
                    log.warning("stopped at step %d; resume=last goes on from %s", trainer.global_step, callback.path)
        raise GracefulStop(signum)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def exit_if_asked(self) -> None:
        """Ends the process if the signal came too late to stop the training; to be called when all else is done."""
        if self._signum:
            raise GracefulStop(self._signum)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)
        self._previous = {}
