from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from samu_lm.data import Batch, ByteTokenizer
from samu_lm.model import RecurrentLM
from samu_lm.training.callbacks import GradientNorm
from samu_lm.training.loop import make_exact
from samu_lm.training.module import TrainingModule
from samu_lm.training.optimizer import AdamW
from samu_lm.training.schedule import Cosine

VOCAB = 258
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}


def packed(lengths: list[int], row: int, seed: int) -> Batch:
    """One row with documents of these lengths, then padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (1, row), generator=generator)
    targets, reset, mask = torch.zeros_like(tokens), torch.zeros(1, row).bool(), torch.zeros(1, row).bool()
    start = 0
    for length in lengths:
        reset[0, start] = True
        targets[0, start : start + length - 1] = tokens[0, start + 1 : start + length]
        mask[0, start : start + length - 1] = True
        start += length
    if start < row:
        reset[0, start] = True
    return Batch(tokens, targets, reset, mask)


def joined(batches: list[Batch]) -> Batch:
    names = ("tokens", "targets", "reset", "loss_mask")
    return Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in names))


class Loader:
    """A loader of given batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class FixedRows(pl.LightningDataModule):
    """Serves given rows, a batch at a time, split over ranks."""

    def __init__(self, rows: list[Batch], batch_size: int) -> None:
        super().__init__()
        self.rows, self.batch_size, self.rows_consumed = rows, batch_size, 0
        self.advances: list[int] = []

    def advance(self, rows: int) -> None:
        self.rows_consumed += rows
        self.advances.append(rows)

    def packing_shares(self) -> dict[str, float]:
        return {}

    def train_dataloader(self) -> Loader:
        assert self.trainer is not None
        mine = self.rows[self.trainer.global_rank :: self.trainer.world_size]
        return Loader([joined(mine[i : i + self.batch_size]) for i in range(0, len(mine), self.batch_size)])

    val_dataloader = train_dataloader


def small_model(seed: int = 0) -> RecurrentLM:
    torch.manual_seed(seed)
    return RecurrentLM(VOCAB, width=16, rnn_width=16, depth=1)


def training_module(compile: bool = False, **options: Any) -> TrainingModule:
    settings = AdamW(lr=0.01, eps=1e-4)
    return TrainingModule(small_model(), settings, Cosine(), ByteTokenizer(), compile=compile, **options)


def one_step(rows: list[Batch], batch_size: int, **options: Any) -> tuple[TrainingModule, pl.Trainer]:
    module = training_module()
    trainer = make_exact(pl.Trainer(max_steps=1, callbacks=[GradientNorm()], **(QUIET | options)))
    trainer.limit_val_batches = 0
    trainer.fit(module, FixedRows(rows, batch_size))
    return module, trainer


class TestLossOfAStep:
    """Documents of 3 and of 997 targets: the loss is a sum over targets divided by all targets of the step."""

    rows = (packed([4], 1000, 1), packed([998], 1000, 2))

    def by_hand(self) -> tuple[Tensor, Tensor]:
        model = small_model()
        batch = joined(list(self.rows))
        logits = model(batch.tokens, batch.reset)
        loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask], reduction="sum") / 1000
        loss.backward()
        return loss.detach(), torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)

    @pytest.mark.parametrize(
        ("batch_size", "options"),
        [
            pytest.param(2, {}, id="batch-2"),
            pytest.param(1, {"accumulate_grad_batches": 2}, id="accumulation-2"),
            pytest.param(1, {"strategy": "ddp_spawn", "devices": 2}, id="two-ranks", marks=pytest.mark.slow),
        ],
    )
    def test_gradient_and_weights_do_not_depend_on_the_split(self, batch_size: int, options: dict[str, Any]) -> None:
        loss, norm = self.by_hand()
        module, trainer = one_step(list(self.rows), batch_size, **options)
        assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(loss), rel=1e-6)
        assert float(trainer.callback_metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
        reference, _ = one_step(list(self.rows), 2)
        for (name, weight), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6, msg=name)

    def test_a_short_last_window_of_an_epoch(self) -> None:
        """Three batches, accumulation 2: the second step has one batch, and its gradient is that batch's own."""
        rows = [*self.rows, packed([40], 1000, 3)]
        norms: list[float] = []

        class Norms(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
                norms.append(float(trainer.callback_metrics.get("grad_norm", 0)))

        frozen = AdamW(lr=1e-12, weight_decay=0.0)
        module = TrainingModule(small_model(), frozen, Cosine(), ByteTokenizer())
        options: dict[str, Any] = QUIET | {"accumulate_grad_batches": 2, "max_epochs": 1}
        trainer = make_exact(pl.Trainer(callbacks=[GradientNorm(), Norms()], **options))
        trainer.limit_val_batches = 0
        trainer.fit(module, FixedRows(rows, 1))
        _, trainer_alone = one_step([rows[2]], 1)
        assert trainer.global_step == 2
        assert norms[-1] == pytest.approx(float(trainer_alone.callback_metrics["grad_norm"]), rel=1e-4)


def test_a_step_without_targets_leaves_no_nan() -> None:
    module, trainer = one_step([packed([1, 1, 1], 3, 0)], 1)
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert float(trainer.callback_metrics["train/loss"]) == 0.0
    assert module.targets_seen == 0


def test_half_padded_rows_count_their_targets_only() -> None:
    rows = [packed([5], 10, 1), packed([3, 2], 10, 2)]
    module, trainer = one_step(rows, 2)
    assert module.targets_seen == 4 + 2 + 1
    assert module.row_tokens_seen == 20
    assert float(trainer.callback_metrics["targets_seen"]) == 7


def test_the_data_advances_once_a_batch_by_all_ranks_rows() -> None:
    data = FixedRows([packed([5], 5, i) for i in range(4)], 1)
    trainer = make_exact(pl.Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET))
    trainer.limit_val_batches = 0
    trainer.fit(training_module(), data)
    assert data.advances == [1, 1, 1, 1]


def test_validation_is_over_all_targets_and_bytes() -> None:
    rows = [packed([4], 40, 1), packed([38], 40, 2)]
    module = training_module()
    trainer = pl.Trainer(**QUIET)
    (metrics,) = trainer.validate(module, FixedRows(rows, 1), verbose=False)
    batch = joined(rows)
    logits = module.model(batch.tokens, batch.reset).float()
    loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask], reduction="sum").item() / 40
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["val/bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-6)  # each target is a byte


class TestCompile:
    @staticmethod
    def losses(compile: bool, rows: list[Batch]) -> tuple[list[float], TrainingModule]:
        found: list[float] = []

        class Losses(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
                found.append(float(trainer.callback_metrics["train/loss"]))

        module = training_module(compile, compile_backend="aot_eager")
        trainer = make_exact(pl.Trainer(max_steps=50, max_epochs=-1, callbacks=[Losses()], **QUIET))
        trainer.limit_val_batches = 0
        trainer.fit(module, FixedRows(rows, 2))
        return found, module

    @pytest.mark.slow
    def test_50_compiled_steps_equal_uncompiled_ones_without_recompiling(self) -> None:
        """The rows hold 1 to 20 documents; a changed number of them is no new shape."""
        rows = [packed([40 // n] * n, 40, n) for n in (1, 2, 4, 5, 8, 10, 20, 1, 20, 3)]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        plain, _ = self.losses(False, rows)
        assert not torch._dynamo.utils.counters["stats"]
        compiled, module = self.losses(True, rows)
        assert compiled == pytest.approx(plain, rel=2e-5)
        assert len(plain) == 50
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert set(module.state_dict()) == {f"model.{name}" for name in small_model().state_dict()}
