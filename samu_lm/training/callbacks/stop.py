"""Stops a run on a signal, or when its time is up, with a checkpoint of its last optimizer step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from samu_lm.errors import ConfigError
from samu_lm.training.callbacks.checkpoints import LastCheckpoint

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIME_IS_UP_STATUS = 124  # that of timeout(1)


class GracefulStop(SystemExit):
    """Ends the process with status 128 + signal. No `Exception`: a launcher of many jobs must not go on to the next."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class TimeIsUp(GracefulStop):
    """Ends the process with status 124: ``trainer.max_time`` is reached and the run is not completed."""

    def __init__(self) -> None:
        SystemExit.__init__(self, TIME_IS_UP_STATUS)


class StopOnSignal(Callback):
    """Finishes the optimizer step (or validation batch, or write) at hand, saves ``last.ckpt`` and ends the process.

    The checkpoint is that of the last finished optimizer step; a validation that the signal cut short is done again
    when the run is resumed. Before the first step a signal ends the process at once, with the same status. A second
    signal ends it at once anyway. With several ranks a signal to any of them stops all at the same step.

    In a job of SLURM, that is of ``srun``, Lightning's plugin says which signal announces the end of the job's time
    (SIGUSR1); after the save the job is then put back in the queue.

    Args:
        requeue: whether it is.
        max_time: the trainer's; counted from this process's start of the run, whatever earlier parts took.

    Raises:
        ConfigError: a time that is none.
    """

    def __init__(self, requeue: bool = True, max_time: str | Mapping[str, int] | None = None) -> None:
        self.requeue = requeue
        self._seconds = _seconds(max_time)
        self._began = time.monotonic()
        self._signum = 0
        self._training = False
        self._owner = 0  # the process whose signals these are
        self._previous: dict[signal.Signals, Any] = {}
        self._requeue_signal: signal.Signals | None = None

    # -- handlers --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self, trainer: pl.Trainer) -> Iterator[None]:
        """While the context lasts, signals come here. To be entered before `fit`; may be entered inside itself."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        self._signum, self._training = 0, False
        environment = trainer._accelerator_connector.cluster_environment
        if self.requeue and isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = environment.requeue_signal
        signals = {*SIGNALS, *([self._requeue_signal] if self._requeue_signal else [])}
        self._owner = os.getpid()
        self._previous = {s: signal.signal(s, self._handle) for s in signals}
        try:
            yield
        finally:
            self._restore()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._training = True
        for s in self._previous:  # Lightning has put a handler of its own in front of some
            signal.signal(s, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked process that prepares batches; Ctrl-C reaches the whole group
            if signum == signal.SIGTERM:  # how its parent ends it
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        second, self._signum = bool(self._signum), signum
        # The system's own action, so that a second signal ends the process even where Python does not get to run.
        for s in self._previous:
            signal.signal(s, signal.SIG_DFL)
        if second:  # Lightning restores handlers when it has ended
            os.kill(os.getpid(), signum)
        # Not by the logger: the signal may have come while it was writing.
        what = "saving the last step, then stopping; again to stop at once" if self._training else "stopping"
        os.write(2, f"{signal.Signals(signum).name}: {what}\n".encode())
        if not self._training:
            raise GracefulStop(signum)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        launcher: Any = trainer.strategy.launcher
        if isinstance(exception, GracefulStop) and not self._training and launcher is not None:
            launcher.kill(signal.SIGTERM)  # ranks that this process started and that wait for it

    def _restore(self) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)
        self._previous = {}

    # -- stopping --------------------------------------------------------------------------------------------------

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
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        signum = self._signum
        time_is_up = self._seconds is not None and time.monotonic() - self._began >= self._seconds
        if trainer.world_size > 1:
            seen = torch.tensor([signum, int(time_is_up)], device=pl_module.device)
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
            signum, time_is_up = int(seen[0]), bool(seen[1])
        completed = 0 <= trainer.max_steps <= trainer.global_step
        if not signum and (not time_is_up or completed):
            return
        why, step = "" if signum else "trainer.max_time is reached: ", trainer.global_step
        savers = [c for c in trainer.callbacks if isinstance(c, LastCheckpoint)]  # type: ignore[attr-defined]
        for callback in savers:
            callback.save(trainer)
            if trainer.is_global_zero:
                log.warning("%sstopped at step %d; resume=last goes on from %s", why, step, callback.path)
        if not savers and trainer.is_global_zero:
            log.warning("%sstopped at step %d, which is not saved: the config has no callbacks.last", why, step)
        if not signum:
            raise TimeIsUp
        if signum == self._requeue_signal and trainer.is_global_zero:
            requeue_job()
        raise GracefulStop(signum)

    def exit_if_asked(self) -> None:
        """Ends the process if the signal came too late to stop the training; to be called when all else is done."""
        if self._signum:
            raise GracefulStop(self._signum)


def _seconds(max_time: str | Mapping[str, int] | None) -> float | None:
    if max_time is None:
        return None
    try:
        seconds = Timer(dict(max_time) if isinstance(max_time, Mapping) else max_time)._duration
    except (MisconfigurationException, TypeError, ValueError, OverflowError) as error:
        remedy = "must be DD:HH:MM:SS, as in 00:11:30:00, or numbers by unit, as in {hours: 11, minutes: 30}"
        raise ConfigError("trainer.max_time", max_time, remedy) from error
    assert seconds is not None
    if seconds <= 0:
        raise ConfigError("trainer.max_time", max_time, "must be longer than no time")
    return seconds


def requeue_job() -> None:
    """Asks SLURM to put this job back in the queue; what keeps it from that is an error in the log."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        log.error("the job %s is not put back in the queue: %s; submit it again with resume=last", job, said)
    else:
        log.warning("the job %s is back in the queue", job)
