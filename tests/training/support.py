"""Very small runs for the tests of the training path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig

from samu_lm.config import config_dir
from samu_lm.training.run import Plan, build_module, collect_results, fit, make_plan

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def write_corpus(folder: Path, documents: int = 24, seed: int = 0) -> Path:
    """A text file of documents of 3 to 60 words, between blank lines."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 60))) for _ in range(documents)]
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(texts))
    return path


def tiny_overrides(corpus: Path) -> list[str]:
    """A model of about 20,000 parameters on 64 tokens a batch; a step takes some milliseconds."""
    return [
        "data=text",
        f"data.path={corpus}",
        "data.separator='\\n\\n'",
        "data.seq_len=32",
        "data.batch_size=2",
        "data.val_fraction=0.2",
        "model.width=16",
        "model.rnn_width=16",
        "model.depth=1",
        "schedule.warmup_steps=2",
        "trainer=cpu",
        "trainer.max_steps=6",
        "trainer.val_check_interval=4",
        "trainer.log_every_n_steps=1",
        "callbacks.last.every_n_steps=0",
    ]


def tiny_config(corpus: Path, *overrides: str) -> DictConfig:
    """The composed config of a tiny run."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("train", [*tiny_overrides(corpus), *overrides])


class Finished:
    """What a run left behind."""

    def __init__(self, plan: Plan, module: Any) -> None:
        self.plan, self.module, self.trainer = plan, module, plan.trainer
        self.results = collect_results(plan, module)


def train_tiny(
    cfg: DictConfig, run_dir: Path, *callbacks: Callback, overrides: Sequence[str] | None = None
) -> Finished:
    """Trains as `samu_lm.training.run.run` does, with callbacks of the test's own before the others."""
    plan = make_plan(cfg, run_dir, overrides)
    plan.trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
    module = build_module(plan)
    fit(plan, module)
    return Finished(plan, module)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, read without running code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two checkpoints differ in any bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{path}/{k}" for k in a.keys() ^ b.keys()]
        return found + [d for k in a if k in b for d in differences(a[k], b[k], f"{path}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [path]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a!r} != {b!r}"]
