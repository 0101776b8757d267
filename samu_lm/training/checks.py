"""Checks of a training config beyond the names and types of keys; nothing is read, allocated or written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samu_lm.config import check_config
from samu_lm.errors import ConfigError

GROUPS = ("model", "data", "tokenizer", "optimizer", "schedule", "trainer", "callbacks", "logger")
TOP_LEVEL: dict[str, None] = dict.fromkeys((*GROUPS, "seed", "compile", "resume"))
BUILT = GROUPS[:6]  # each is one object; the other two are sets of them


def check(cfg: DictConfig) -> None:
    """Refuses unknown keys, values of a wrong type or out of range, and missing interpolations.

    Raises:
        ConfigError: the first fault found, by its full key.
    """
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    for key, fits, remedy in (
        ("seed", _is_seed, "must be a whole number from 0 to 4294967295"),
        ("compile", lambda value: isinstance(value, bool), "must be true or false"),
        ("resume", lambda value: isinstance(value, str | None), "must be last, a checkpoint's path, or null"),
    ):
        value = raw.get(key)
        if not OmegaConf.is_interpolation(cfg, key) and not fits(value):
            raise ConfigError(key, value, remedy)
    known = cfg.copy()
    if OmegaConf.select(known, "model._target_") and OmegaConf.select(known, "model.vocab_size") is None:
        known.model.vocab_size = 1  # null is the tokenizer's
    check_config(known, TOP_LEVEL)
    for group in BUILT:
        if not isinstance(cfg.get(group), DictConfig) or "_target_" not in cfg[group]:
            raise ConfigError(group, cfg.get(group), f"must be one of configs/{group}")
    _check_trainer(cfg.trainer)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _check_trainer(trainer: DictConfig) -> None:
    """Refuses what Lightning would take, or would find only once it trains."""
    clip = trainer.get("gradient_clip_val")
    if clip is not None and not clip > 0:
        raise ConfigError("trainer.gradient_clip_val", clip, "must be positive, or null for no clipping")
    accumulate = trainer.get("accumulate_grad_batches", 1)
    if accumulate < 1:
        raise ConfigError("trainer.accumulate_grad_batches", accumulate, "must be at least 1")
    precision = str(trainer.get("precision"))
    if precision.startswith("16"):
        raise ConfigError("trainer.precision", precision, "float16 overflows here; use bf16-mixed or 32-true")
    steps = trainer.get("max_steps")
    if steps is not None and steps < 1 and steps != -1:
        raise ConfigError("trainer.max_steps", steps, "must be at least 1, or -1 with trainer.max_epochs")


def refuse_overwriting(run_dir: Path) -> None:
    """Refuses to start a new run over the checkpoints of an old one."""
    if found := sorted((run_dir / "checkpoints").glob("*.ckpt")):
        remedy = f"holds a run's {found[-1].name}; add resume=last to go on with it, or choose another folder"
        raise ConfigError("hydra.run.dir", run_dir, remedy)


def check_writable(run_dir: Path) -> None:
    """Refuses a run folder in which no file can be written."""
    folder = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("hydra.run.dir", run_dir, f"cannot be written ({folder}); choose another folder")
