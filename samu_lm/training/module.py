"""The training step: loss, gradient scale, optimizer, validation.

Shapes: B rows, L tokens, V vocabulary. A step is one optimizer step: all accumulated batches on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from samu_lm.checkpoint import FORMAT
from samu_lm.data import Batch, Tokenizer
from samu_lm.errors import ConfigError
from samu_lm.training.gradients import gradient_norms
from samu_lm.training.loop import ExactEpochLoop, is_logged, settle
from samu_lm.training.loss import compiled_nll, packed_nll
from samu_lm.training.optimizer import AdamW
from samu_lm.training.schedule import Schedule
from samu_lm.training.sharded import ShardedStrategy, average_whole_gradients, is_sharded, local_part, shard_model


class TrainingModule(pl.LightningModule):
    """Trains a recurrent language model on packed rows.

    The loss of a step is the sum of the cross entropies of all its targets divided by their number, whatever the split
    into accumulated batches and ranks. Lightning averages over batches and ranks instead; `on_after_backward` turns
    its average into ours before anything (gradient norm, clipping, optimizer) looks at the gradients.

    Args:
        model: the language model; its weights are saved under ``model.``.
        optimizer: AdamW's settings.
        schedule: the learning rate's factor of each optimizer step.
        tokenizer: counts the bytes that targets stand for; saved with the weights.
        config: the run's composed config, saved with the weights.
        compile: compile the model and the cross entropy with `torch.compile`; saved names stay the same.
        compile_backend: backend of `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        schedule: Schedule,
        tokenizer: Tokenizer,
        config: dict[str, Any] | None = None,
        compile: bool = False,
        compile_backend: str = "inductor",
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer_settings, self.schedule = optimizer, schedule
        self.tokenizer, self.config = tokenizer, config or {}
        self.row_tokens_seen = 0  # over all ranks and the whole life of the run, padding included
        self._targets_seen: Tensor | float = 0.0
        self._nll: Callable[..., Tensor] = compiled_nll(model, backend=compile_backend) if compile else packed_nll
        # Sums since the last step, on the device, this rank's part: nats, targets.
        self._step_sums: Tensor | None = None
        self.step_loss = torch.tensor(0.0)  # nats per target of the step whose gradient is ready
        self._step_row_tokens = 0
        self._val_sums: Tensor | None = None  # nats, targets, bytes
        self._bytes_of_token: Tensor | None = None

    def configure_model(self) -> None:
        """Cuts the model over the ranks where the trainer's strategy wants that. Lightning may call this twice."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy) and not is_sharded(self.model):
            shard_model(self.model, strategy.device_mesh["data_parallel"])

    # -- loss ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        """Sum over the batch's targets of their cross entropy in nats, a float32 scalar."""
        return self._nll(self.model, batch.tokens, batch.targets, batch.reset, batch.loss_mask)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's sum; the division by the step's targets is in `on_after_backward`."""
        nats = self(batch)
        sums = torch.stack([nats.detach().double(), batch.loss_mask.sum().double()])
        self._step_sums = sums if self._step_sums is None else self._step_sums + sums
        rows = batch.tokens.shape[0] * self.trainer.world_size
        self._step_row_tokens += rows * batch.tokens.shape[1]
        # Here and not in a later hook: checkpoints written at the batch's end must hold the place after it.
        self.trainer.datamodule.advance(rows)  # type: ignore[attr-defined]
        return nats

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop._should_accumulate():
            return
        assert self._step_sums is not None
        nats, targets = self._reduce(self._step_sums)
        averaged_over = self.trainer.accumulate_grad_batches * self.trainer.world_size
        at_least_one = targets.clamp(min=1)  # a step without targets has zero gradients, not NaN
        if isinstance(self.trainer.strategy, ShardedStrategy):
            average_whole_gradients(self)
        gradients = [local_part(p.grad) for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, (averaged_over / at_least_one).float())
        self.step_loss = nats / at_least_one
        self._targets_seen = self._targets_seen + targets
        self.row_tokens_seen += self._step_row_tokens
        self._step_sums, self._step_row_tokens = None, 0
        if is_logged(self.trainer, self.trainer.global_step + 1):
            self.log("train/loss", self.step_loss, prog_bar=True)
            self.log("targets_seen", self._targets_seen)
            for name, share in self.trainer.datamodule.packing_shares().items():  # type: ignore[attr-defined]
                self.log(name, torch.tensor(share, dtype=torch.float64))
            self._log_place(self.trainer.global_step + 1)

    @property
    def at_step_start(self) -> bool:
        """Whether the next batch is the first of an optimizer step."""
        return self._step_sums is None

    @property
    def targets_seen(self) -> int:
        """Targets trained on, over all ranks and the whole life of the run."""
        return int(self._targets_seen)

    def _log_place(self, step: int) -> None:
        # The loggers' step axis is the number of finished optimizer steps, that of the checkpoints.
        for name, value in (("step", step), ("epoch", self.trainer.current_epoch)):
            self.log(name, torch.tensor(value, dtype=torch.float64))

    def _reduce(self, sums: Tensor) -> Tensor:
        """The sums over all ranks."""
        return self.trainer.strategy.reduce(sums, reduce_op="sum")

    # -- validation ------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._val_sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self._bytes_of_token is None:
            counts = np.asarray(self.tokenizer.num_bytes(np.arange(self.tokenizer.vocab_size)))
            self._bytes_of_token = torch.as_tensor(counts, dtype=torch.int64)
        self._bytes_of_token = self._bytes_of_token.to(self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert self._val_sums is not None
        assert self._bytes_of_token is not None
        num_bytes = (self._bytes_of_token[batch.targets] * batch.loss_mask).sum()
        self._val_sums += torch.stack([self(batch).double(), batch.loss_mask.sum().double(), num_bytes.double()])

    def on_validation_epoch_end(self) -> None:
        assert self._val_sums is not None
        nats, targets, num_bytes = self._reduce(self._val_sums).tolist()
        self._val_sums = None
        if targets:
            self.log("val/loss", torch.tensor(nats / targets, dtype=torch.float64), prog_bar=True)
            if num_bytes:
                bits = torch.tensor(nats / math.log(2) / num_bytes, dtype=torch.float64)
                self.log("val/bits_per_byte", bits)
        self._log_place(self.trainer.global_step)
        if is_sharded(self.model):
            self.model.reshard()  # type: ignore[operator]  # what no backward pass does here
        loop = self.trainer.fit_loop.epoch_loop
        if isinstance(loop, ExactEpochLoop) and not self.trainer.sanity_checking:
            loop.validated()

    # -- optimizer -------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer_settings.build(self.model)  # type: ignore[arg-type]
        total_steps = self.total_steps()
        self.schedule.check(total_steps)
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.factor(step, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning's own refuses a fused optimizer in bfloat16, for the sake of a loss scale that only float16 has.
        if gradient_clip_val is None:
            return
        if is_sharded(self):
            self._clip_shards(gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def _clip_shards(self, limit: float, algorithm: str | None) -> None:
        norm = torch.linalg.vector_norm(torch.stack(list(gradient_norms(self).values())))
        gradients = [local_part(p.grad) for p in self.parameters() if p.grad is not None]
        if algorithm == "value":
            torch._foreach_clamp_max_(gradients, limit)
            torch._foreach_clamp_min_(gradients, -limit)
        elif gradients:
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))

    def total_steps(self) -> int:
        """Optimizer steps of the schedule: its own where given, else those of the run."""
        steps = self.schedule.total_steps or self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ConfigError(
                "trainer.max_steps", self.trainer.max_steps, "give it, trainer.max_epochs or schedule.total_steps"
            )
        return int(steps)

    def on_train_start(self) -> None:
        # A resumed run's optimizer was loaded with the values of its earlier part; today's config is what holds.
        optimizer, scheduler = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(scheduler, LambdaLR)
        self.optimizer_settings.apply_to(optimizer)
        factor = self.schedule.factor(scheduler.last_epoch, self.total_steps())
        scheduler.base_lrs = [self.optimizer_settings.lr] * len(optimizer.param_groups)
        for group in optimizer.param_groups:
            group["lr"] = self.optimizer_settings.lr * factor

    # -- checkpoint ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if isinstance(self.trainer.fit_loop.epoch_loop, ExactEpochLoop):
            settle(checkpoint)
        checkpoint["samu_lm"] = {
            "format": FORMAT,
            "config": self.config,
            "tokenizer": self.tokenizer.state_dict(),
            "targets_seen": self.targets_seen,
            "row_tokens_seen": self.row_tokens_seen,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._targets_seen = float(checkpoint["samu_lm"]["targets_seen"])
        self.row_tokens_seen = checkpoint["samu_lm"]["row_tokens_seen"]
