"""Checks of a training config beyond the names and types of keys; nothing is read, allocated or written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from samu_lm.config import check_config
from samu_lm.errors import ConfigError
from samu_lm.model import fp8

GROUPS = ("model", "data", "tokenizer", "optimizer", "schedule", "trainer", "callbacks", "logger")
TOP_LEVEL: dict[str, None] = dict.fromkeys((*GROUPS, "seed", "compile", "fp8", "resume"))
PRECISIONS = ("32-true", "32", "bf16-mixed", "bf16-true", "bf16")
BUILT = GROUPS[:6]  # each is one object; the other two are sets of them


def check(cfg: DictConfig) -> None:
    """Refuses unknown keys, values of a wrong type or out of range, and missing interpolations.

    Raises:
        ConfigError: the first fault found, by its full key.
    """
    _check_top_level(cfg, resolved=False)  # before what refers to them
    known = cfg.copy()
    if OmegaConf.select(known, "model._target_") and OmegaConf.select(known, "model.vocab_size") is None:
        known.model.vocab_size = 1  # null is the tokenizer's
    if OmegaConf.select(known, "trainer.precision", throw_on_resolution_failure=False) is not None:
        known.trainer.precision = None  # _check_trainer knows what it may be; Lightning's type is another
    check_config(known, TOP_LEVEL)
    _check_top_level(cfg, resolved=True)
    for group in BUILT:
        if not isinstance(cfg.get(group), DictConfig) or "_target_" not in cfg[group]:
            raise ConfigError(group, cfg.get(group), f"must be one of configs/{group}")
    _check_trainer(cfg.trainer)


def _is_place(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value.strip()))


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _check_trainer(trainer: DictConfig) -> None:
    """Refuses what Lightning would take, or would find only once it trains."""
    for name, fits, remedy in _TRAINER_RULES:
        value = trainer.get(name)
        if value is not None and not fits(value):
            raise ConfigError(f"trainer.{name}", value, remedy)
    steps, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
    if steps in (None, -1) and epochs in (None, -1) and trainer.get("max_time") is None:
        raise ConfigError("trainer.max_steps", steps, "a run needs an end; give it, or trainer.max_epochs")


_TOP_LEVEL_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("seed", _is_seed, "must be a whole number from 0 to 4294967295"),
    ("compile", lambda value: value == "auto" or isinstance(value, bool), "must be true, false or auto"),
    # null: a config from before the key
    ("fp8", lambda value: value is None or value in fp8.RECIPES, f"must be one of {', '.join(fp8.RECIPES)}"),
    ("resume", _is_place, "must be last, auto, a checkpoint's path, or null"),
)


def _check_top_level(cfg: DictConfig, resolved: bool) -> None:
    """Refuses values of the single keys: plain ones, or once they are known to resolve those of references, too."""
    for key, fits, remedy in _TOP_LEVEL_RULES:
        if resolved or key not in cfg or not OmegaConf.is_interpolation(cfg, key):
            value = cfg.get(key)
            if not fits(value):
                raise ConfigError(key, value, remedy)


def _is_share_or_count(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else 0 < value <= 1


_SHARE = "must be a count of batches of at least 1, or a share of them above 0 and up to 1.0"
# Key, what fits, and the remedy; null is left to Lightning.
_TRAINER_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("gradient_clip_val", lambda v: v > 0, "must be positive, or null for no clipping"),
    ("accumulate_grad_batches", lambda v: v >= 1, "must be at least 1"),
    (
        "precision",
        lambda v: v == "auto" or str(v) in PRECISIONS,
        f"must be one of {', '.join(('auto', '32-true', 'bf16-mixed', 'bf16-true'))}",
    ),
    ("max_steps", lambda v: v >= 1 or v == -1, "must be at least 1, or -1 with trainer.max_epochs"),
    ("max_epochs", lambda v: v >= 1 or v == -1, "must be at least 1, or null"),
    ("val_check_interval", _is_share_or_count, _SHARE),
    ("limit_val_batches", _is_share_or_count, _SHARE),
    ("limit_train_batches", _is_share_or_count, _SHARE),
    ("log_every_n_steps", lambda v: v >= 1, "must be at least 1"),
    ("check_val_every_n_epoch", lambda v: v >= 1, "must be at least 1, or null to count batches over the epochs"),
)


def fp8_recipe(cfg: DictConfig) -> str:
    """The recipe of a config's float8 products, ``none`` where it is older than the key."""
    return cfg.get("fp8") or "none"


def check_fp8(cfg: DictConfig, device: torch.device) -> None:
    """Refuses float8 products that the precision, the sizes or the device do not allow.

    Raises:
        ConfigError: the first key that stands in the way.
    """
    recipe = fp8_recipe(cfg)
    if recipe == "none":
        return
    precision = str(cfg.trainer.get("precision"))
    if not precision.startswith("bf16"):
        fp8.check_fp8(recipe, device)  # on a device without float8 no precision helps
        raise ConfigError(
            "trainer.precision", precision, f"fp8={recipe} needs bf16-mixed or bf16-true; or use fp8=none"
        )
    for name in ("width", "rnn_width"):
        size = cfg.model.get(name, 0)
        if size % fp8.MULTIPLE:
            raise ConfigError(f"model.{name}", size, f"fp8={recipe} needs {_multiple(size)}, or use fp8=none")
    rows, length = cfg.data.get("batch_size", 1), cfg.data.get("seq_len", fp8.MULTIPLE)
    if rows * length % fp8.MULTIPLE:
        remedy = f"with data.batch_size={rows}, fp8={recipe} needs {_multiple(length)}, or use fp8=none"
        raise ConfigError("data.seq_len", length, remedy)
    fp8.check_fp8(recipe, device)


def _multiple(size: int) -> str:
    return f"a multiple of {fp8.MULTIPLE}; try {-(-size // fp8.MULTIPLE) * fp8.MULTIPLE}"


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
