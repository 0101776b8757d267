from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.training.loggers import read_rows
from tests.training.support import tiny_config, train_tiny, write_corpus


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
