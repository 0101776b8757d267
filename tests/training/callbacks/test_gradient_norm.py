from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.callbacks import NonFiniteGradientError
from samu_lm.training.loggers import read_rows
from tests.training.support import differences, load, tiny_config, train_tiny, write_corpus

NAME = "model.blocks.0.mlp.gate.weight"


class Spoil(Callback):
    """Puts a value into a gradient at a step."""

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value = step, value

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step:
            dict(module.named_parameters())[NAME].grad[0, :2] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_leaves_weights_optimizer_and_checkpoint_as_they_were(tmp_path: Path, value: float) -> None:
    corpus = write_corpus(tmp_path)
    settings = ["callbacks.last.every_n_steps=1", "schedule.total_steps=6", "trainer.val_check_interval=50"]
    train_tiny(tiny_config(corpus, *settings, "trainer.max_steps=2"), tmp_path / "good")
    weights: dict[str, Any] = {}

    class Keep(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            weights.update({name: p.detach().clone() for name, p in module.state_dict().items()})

    with pytest.raises(NonFiniteGradientError, match=rf"^step 3: the gradient of {NAME} has 2 of \d+ values"):
        train_tiny(tiny_config(corpus, *settings), tmp_path / "bad", Spoil(3, value), Keep())
    good, last = (load(tmp_path / which / "checkpoints" / "last.ckpt") for which in ("good", "bad"))
    assert last["global_step"] == 2
    assert differences(last["state_dict"], good["state_dict"]) == []
    assert differences(last["optimizer_states"], good["optimizer_states"]) == []
    assert differences(weights, good["state_dict"]) == []


def test_an_overflowing_norm_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"^step 2: the gradient's norm overflows float32"):
        train_tiny(tiny_config(write_corpus(tmp_path)), tmp_path / "run", Spoil(2, 3e38))


def test_the_norm_is_that_before_clipping(tmp_path: Path) -> None:
    norms: list[float] = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))

    train_tiny(tiny_config(write_corpus(tmp_path), "trainer.gradient_clip_val=1e-3"), tmp_path / "run", Norms())
    rows = read_rows(tmp_path / "run" / "logs" / "metrics.csv")
    logged = [float(row["grad_norm"]) for row in rows if row["grad_norm"]]
    assert logged == pytest.approx(norms)
    assert min(norms) > 1e-3
