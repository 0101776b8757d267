"""The training path on a GPU: bfloat16, compiled, resumed, over two devices."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.training.callbacks.mfu import peak_flops
from tests.training.support import load, tiny_config, train_tiny, write_corpus

SMALL = [
    "trainer.accelerator=gpu",
    "trainer.precision=32-true",
    "compile=false",
    "model.width=64",
    "model.rnn_width=128",
    "model.depth=2",
    "data.seq_len=128",
    "data.batch_size=4",
    "data.val_fraction=0.2",
    "trainer.max_steps=8",
    "schedule.total_steps=8",
]


def config(tmp_path: Path, *overrides: str) -> Any:
    return tiny_config(write_corpus(tmp_path, documents=60), *SMALL, *overrides)


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "logs" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run_dir: Path) -> list[float]:
    return [float(row["train/loss"]) for row in rows(run_dir) if row["train/loss"]]


@pytest.mark.parametrize("model", ["samu_tiny", "rglru_tiny"])
def test_bfloat16_logs_memory_and_utilisation(tmp_path: Path, model: str) -> None:
    done = train_tiny(config(tmp_path, "trainer.precision=bf16-mixed", f"model={model}"), tmp_path / "run")
    logged = [row for row in rows(tmp_path / "run") if row["train/loss"]]
    assert len(logged) == 8
    assert all(float(row["memory/allocated"]) > 0 and float(row["memory/reserved"]) > 0 for row in logged)
    known = peak_flops(torch.device("cuda", 0), "bf16-mixed") is not None
    assert known == ("mfu" in logged[0])
    if known:
        assert all(0 < float(row["mfu"]) < 1 for row in logged)
    assert 0 < done.results["val/loss"] < 7
    checkpoint = load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert all(weight.dtype == torch.float32 for weight in checkpoint["state_dict"].values())
    assert "cuda" in checkpoint["rng"][0]


def test_float32_trains_as_on_the_cpu(tmp_path: Path) -> None:
    train_tiny(config(tmp_path), tmp_path / "gpu")
    train_tiny(config(tmp_path, "trainer.accelerator=cpu"), tmp_path / "cpu")
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_compiled_trains_as_uncompiled(tmp_path: Path) -> None:
    train_tiny(config(tmp_path, "trainer.precision=bf16-mixed"), tmp_path / "plain")
    train_tiny(config(tmp_path, "trainer.precision=bf16-mixed", "compile=true"), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=0.02)


def test_resumed_goes_on_as_the_straight_run(tmp_path: Path) -> None:
    train_tiny(config(tmp_path), tmp_path / "straight")
    train_tiny(config(tmp_path, "trainer.max_steps=3"), tmp_path / "resumed")
    train_tiny(config(tmp_path, "resume=last"), tmp_path / "resumed")
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "straight"), rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    two = ["trainer.devices=2", "trainer.strategy=ddp_spawn", "data.batch_size=2"]
    train_tiny(config(tmp_path), tmp_path / "one")
    train_tiny(config(tmp_path, *two), tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert not math.isnan(losses(tmp_path / "two")[-1])
