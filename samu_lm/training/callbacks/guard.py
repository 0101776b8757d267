"""Looks at the loss and the gradient of every optimizer step before the update is made."""

from __future__ import annotations

import logging
import math
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.data import Batch
from samu_lm.errors import ConfigError
from samu_lm.training.bundle import make_bundle, whole_weights
from samu_lm.training.callbacks.checkpoints import NonFiniteError
from samu_lm.training.callbacks.rng import rng_state
from samu_lm.training.checkpoint_io import AtomicCheckpointIO, CheckpointWriteError
from samu_lm.training.gradients import gradient_norms
from samu_lm.training.loop import is_logged
from samu_lm.training.module import TrainingModule
from samu_lm.training.sharded import local_part

log = logging.getLogger(__name__)


class StepGuard(Callback):
    """Stops the run, or leaves the update out, where loss or gradient is NaN or infinite, or has jumped.

    Weights and optimizer are then as the step before left them, bit for bit. What is needed to run the step again
    (weights, batches, random numbers) is written to ``bundles/step-N.pt`` for `samu-lm replay`. A skipped step counts
    as one: its data is used up and the learning rate moves on.

    Args:
        non_finite: ``stop`` (status 3) or ``skip``, at NaN or infinity.
        spike: ``stop`` or ``skip``, at a jump.
        loss_factor: a loss above so many times the median of the last steps' is a jump; None: no loss is.
        norm_factor: the same for the gradient's norm before clipping.
        window: steps over which the median is taken; there are no jumps before so many.
        max_skipped: stop at the next bad step after so many skipped ones in a row.
        keep: bundles to keep, the newest; 0 writes none.
        run_dir: the run's folder.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        non_finite: str = "stop",
        spike: str = "stop",
        loss_factor: float | None = None,
        norm_factor: float | None = None,
        window: int = 100,
        max_skipped: int = 10,
        keep: int = 3,
        run_dir: str = ".",
    ) -> None:
        self.non_finite, self.spike = non_finite, spike
        self.factors = {"loss": loss_factor, "norm": norm_factor}
        self.window, self.max_skipped, self.keep = window, max_skipped, keep
        for name in ("non_finite", "spike"):
            if getattr(self, name) not in ("stop", "skip"):
                raise ConfigError(f"callbacks.guard.{name}", getattr(self, name), "must be stop or skip")
        for name, factor in self.factors.items():
            if factor is not None and not factor > 1:
                raise ConfigError(f"callbacks.guard.{name}_factor", factor, "must be above 1, or null")
        for name, least in (("window", 1), ("max_skipped", 0), ("keep", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"callbacks.guard.{name}", getattr(self, name), f"must be at least {least}")
        self.folder = Path(run_dir).absolute() / "bundles"
        self.skipped = self._in_a_row = 0
        self._recent: dict[str, list[float]] = {"loss": [], "norm": []}
        self._batches: list[Batch] = []
        self._rng: dict[str, Any] = {}

    # -- the step ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        if pl_module.at_step_start:
            self._batches, self._rng = [], rng_state()
        self._batches.append(batch)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raises:
        NonFiniteError: before the optimizer has touched a weight; names the step and the first bad tensor.
        """
        assert isinstance(pl_module, TrainingModule)
        norms = gradient_norms(pl_module)
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        loss, norm = torch.stack([pl_module.step_loss.double(), total.double()]).tolist()  # the step's one wait
        reason = self._non_finite(pl_module, loss, norm, norms)
        action = self.non_finite if reason else self.spike
        reason = reason or self._jump({"loss": loss, "norm": norm})
        if reason is None:
            self._in_a_row = 0
            for name, value in (("loss", loss), ("norm", norm)):
                if self.factors[name] is not None:
                    self._recent[name] = [*self._recent[name], value][-self.window :]
        else:
            self._bad_step(trainer, pl_module, reason, action, loss, norms)
        if self.skipped and is_logged(trainer, trainer.global_step + 1):
            pl_module.log("skipped_steps", torch.tensor(self.skipped, dtype=torch.float64))

    @staticmethod
    def _non_finite(module: TrainingModule, loss: float, norm: float, norms: dict[str, torch.Tensor]) -> str | None:
        if math.isfinite(loss) and math.isfinite(norm):
            return None
        text = "" if math.isfinite(loss) else f"the loss is {loss}; "
        for name, value in norms.items():
            if not math.isfinite(value):
                gradient: Any = module.get_parameter(name).grad
                gradient = local_part(gradient)
                count = int((~torch.isfinite(gradient)).sum())
                if count:
                    text += f"the gradient of {name} has {count} of {gradient.numel()} values that are NaN or infinite"
                else:
                    text += f"the norm of the gradient of {name} overflows float32 although each value is finite"
                return text
        return text.removesuffix("; ") or "the gradient's norm overflows float32 although each value is finite"

    def _jump(self, values: dict[str, float]) -> str | None:
        words = {"loss": "the loss", "norm": "the gradient's norm"}
        for name, value in values.items():
            factor, recent = self.factors[name], self._recent[name]
            if factor is None or len(recent) < self.window:
                continue
            median = statistics.median(recent)
            if value > factor * median:
                times = f"{value / median:.1f} times the median {median:.4g} of {self.window} steps"
                return f"{words[name]} is {value:.4g}, {times} (callbacks.guard.{name}_factor={factor})"
        return None

    def _bad_step(
        self,
        trainer: pl.Trainer,
        module: TrainingModule,
        reason: str,
        action: str,
        loss: float,
        norms: dict[str, torch.Tensor],
    ) -> None:
        step = trainer.global_step + 1
        bundle = self._write_bundle(trainer, module, step, reason, loss, norms)
        again = f"; samu-lm replay {bundle}" if bundle else ""
        if action == "skip" and self._in_a_row < self.max_skipped:
            self._in_a_row, self.skipped = self._in_a_row + 1, self.skipped + 1
            for parameter in module.parameters():
                parameter.grad = None  # without gradients the optimizer leaves weights, moments and their count alone
            if trainer.is_global_zero:
                log.warning("step %d: %s; its update is left out%s", step, reason, again)
            return
        if action == "skip":
            reason += f" (after {self._in_a_row} skipped steps in a row, callbacks.guard.max_skipped)"
        raise NonFiniteError(f"step {step}: {reason}; the weights are those of the step before{again}")

    def _write_bundle(
        self,
        trainer: pl.Trainer,
        module: TrainingModule,
        step: int,
        reason: str,
        loss: float,
        norms: dict[str, torch.Tensor],
    ) -> Path | None:
        """Every rank takes part; the first writes."""
        if not self.keep:
            return None
        weights = whole_weights(module)
        batches = [[batch.to("cpu") for batch in self._batches]]
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, batches[0])
            batches = gathered
        path = self.folder / f"step-{step}.pt"
        if not trainer.is_global_zero:
            return path
        bundle = make_bundle(
            module, step, reason, weights, [b for rank in batches for b in rank], self._rng, loss, norms
        )
        bundle["averaged_over"] = trainer.accumulate_grad_batches * trainer.world_size
        try:
            AtomicCheckpointIO().save_checkpoint(bundle, path)
        except CheckpointWriteError as error:
            log.error("no bundle of step %d to replay: %s", step, error)
            return None
        for old in sorted(self.folder.glob("step-*.pt"), key=lambda p: int(p.stem.partition("-")[2]))[: -self.keep]:
            old.unlink()
        return path

    # -- the state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"recent": recent, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recent = {name: list(values) for name, values in state_dict["recent"].items()}
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]
