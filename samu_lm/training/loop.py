"""Lightning's epoch loop, made to resume exactly.

Lightning 2.6 restarts from counters that differ with the hook in which a checkpoint was written. From some of them it
leaves out a validation that was due, from others it loses the place in the epoch at the second restart. Here every
checkpoint, wherever it is written, holds the counters of one situation: the last optimizer step is finished, its
epoch is not, and a validation either is still owed for that step or is not. A restart takes them up and goes on with
what the uninterrupted run did next.

Validation falls on optimizer steps only (one that comes due between two accumulated batches waits for the step), and
the last step of a run is validated too, so that a finished run has a validation loss of its final weights.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call


@runtime_checkable
class StepEndHook(Protocol):
    """A callback that acts once an optimizer step is finished and its metrics are logged, before any validation."""

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None: ...


def is_logged(trainer: pl.Trainer, step: int) -> bool:
    """Whether an optimizer step, counted from 1, is one whose metrics are logged. The last one always has metrics."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return step == trainer.max_steps or (every > 0 and step % every == 0)


class ExactEpochLoop(_TrainingEpochLoop):
    """An epoch's batches; see the module's docstring for what differs from Lightning's own loop."""

    def __init__(self, trainer: pl.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._owed = False  # after a restart: a validation of the loaded step comes first
        self._due_since_step = False
        self._validated_batches = -1  # total batches at the last finished validation
        self._loaded_rows_per_batch: int | None = None

    @property
    def validation_owed(self) -> bool:
        """Whether the last finished optimizer step is still to be validated."""
        if self._owed:
            return True
        fetcher = self.trainer.fit_loop._data_fetcher
        if fetcher is None or self._validated_batches == self.batch_progress.total.ready:
            return False
        return self._due(fetcher)

    def owe_validation(self) -> None:
        """Has the step that is going to be loaded validated first, whatever its checkpoint says."""
        self._owed = True

    @property
    def validation_owed_at_start(self) -> bool:
        """Whether the loaded step is still to be validated, before any other."""
        return self._owed

    def validated(self) -> None:
        """Notes that a validation of the current weights is finished."""
        self._owed = False
        self._validated_batches = self.batch_progress.total.ready

    # -- the loop --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        if not self.restarting:
            super().reset()
            return
        # The counters are those of a finished step (see `settle`); nothing of Lightning's own restart applies to them.
        self._restarting = False
        self.val_loop._restarting = False
        if self._loaded_rows_per_batch not in (None, self._rows_per_batch()):
            self._recount_batches()
        if not self._owed:
            self._validated_batches = self.batch_progress.total.ready

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        if self._owed:
            self._batches_that_stepped -= 1  # it is logged at the step that it belongs to
            self._validate()
            self._batches_that_stepped += 1
            self._owed = False  # also where there is nothing to validate with

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        self._due_since_step |= super()._should_check_val_fx(data_fetcher)
        if not self._should_accumulate():
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, StepEndHook):
                    callback.on_step_end(self.trainer, self.trainer.lightning_module)
        super().on_advance_end(data_fetcher)
        if not self._should_accumulate():
            self._due_since_step = False

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        return not self._should_accumulate() and self._due(data_fetcher)

    def _due(self, data_fetcher: _DataFetcher) -> bool:
        if not self.trainer.enable_validation:
            return False
        last_step = self.max_steps != -1 and self.global_step >= self.max_steps
        return last_step or self._due_since_step or super()._should_check_val_fx(data_fetcher)

    def _validate(self) -> None:
        trainer = self.trainer
        trainer.validating = True
        first_loop_iter = trainer._logger_connector._first_loop_iter
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        self.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_loop_iter

    def _rows_per_batch(self) -> int:
        """Rows of a batch over all ranks."""
        return self.trainer.datamodule.batch_size * self.trainer.world_size  # type: ignore[attr-defined]

    def _recount_batches(self) -> None:
        """Counts the epoch's finished batches as if all had had today's size; the data's place is a number of rows."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        inside = data.rows_consumed % data.rows_per_epoch
        left = -(-(data.rows_per_epoch - inside) // self._rows_per_batch()) if inside else 0
        done = int(self.trainer.num_training_batches) - left
        current = self.batch_progress.current
        current.ready = current.started = current.processed = current.completed = done  # type: ignore[attr-defined]

    # -- the state -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self) -> dict[str, Any]:
        own = {"validation_owed": self.validation_owed, "rows_per_batch": self._rows_per_batch()}
        return super().on_save_checkpoint() | own

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._owed |= bool(state_dict.get("validation_owed", False))
        self._loaded_rows_per_batch = state_dict.get("rows_per_batch")


class ExactFitLoop(_FitLoop):
    """The loop over epochs; a run whose last step is still to be validated is not done."""

    @property
    def done(self) -> bool:
        owed = isinstance(self.epoch_loop, ExactEpochLoop) and self.epoch_loop.validation_owed_at_start
        return not owed and super().done


def make_exact(trainer: pl.Trainer, validation_owed: bool = False) -> pl.Trainer:
    """Gives a trainer the exact loops; to be called before `fit`.

    Args:
        trainer: Lightning's.
        validation_owed: the step that `fit` goes on from is validated first, whatever its checkpoint says.
    """
    loop = trainer.fit_loop
    own = loop.epoch_loop
    trainer.fit_loop = ExactFitLoop(trainer, min_epochs=loop.min_epochs, max_epochs=loop.max_epochs)
    trainer.fit_loop.epoch_loop = ExactEpochLoop(trainer, min_steps=own.min_steps, max_steps=own.max_steps)
    if validation_owed:
        trainer.fit_loop.epoch_loop.owe_validation()
    return trainer


def settle(checkpoint: dict[str, Any]) -> None:
    """Rewrites a checkpoint's loop counters to those of a finished optimizer step in an unfinished epoch."""
    loops = checkpoint["loops"]["fit_loop"]
    for scope in ("total", "current"):
        batches = loops["epoch_loop.batch_progress"][scope]
        batches["started"] = batches["processed"] = batches["completed"] = batches["ready"]
        epochs = loops["epoch_progress"][scope]
        epochs["ready"] = epochs["started"]
        epochs["processed"] = epochs["completed"] = epochs["started"] - 1
        validation = loops["epoch_loop.val_loop.batch_progress"][scope]
        validation.update(dict.fromkeys(validation, 0))
    loops["epoch_loop.val_loop.batch_progress"]["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = checkpoint["global_step"]
    checkpoint["epoch"] = loops["epoch_progress"]["current"]["processed"]


def validation_owed(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint's step was not validated yet although it was due."""
    state = cast("dict[str, Any]", checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"])
    return bool(state.get("validation_owed", False))
