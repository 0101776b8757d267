"""What a run's folder says about the run: config, overrides, environment, results."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from samu_lm.data.files import launch_path
from samu_lm.environment import environment


def write_record(folder: Path, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Writes ``config.yaml`` (composed and resolved), ``overrides.yaml`` and ``environment.json`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(dict(config)), folder / "config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), folder / "overrides.yaml")
    write_json(folder / "environment.json", environment())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON by way of a temporary file, so that no reader finds half of it; NaN and infinity become null."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)


def read_results(run_dir: Path) -> dict[str, Any]:
    """What a run's ``results.json`` holds; nothing where it is missing or damaged."""
    try:
        content = json.loads((run_dir / "results.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_completed(run_dir: Path, step: int, trainer: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a run's ``results.json`` says that it was completed at a step, and its length is still the same.

    Args:
        run_dir: the run's folder.
        step: optimizer step of the checkpoint to go on from.
        trainer: the trainer's arguments now.
        saved: those in the checkpoint.
    """
    results = read_results(run_dir)
    if (results.get("status"), results.get("global_step")) != ("completed", step):
        return False
    return trainer.get("max_steps") == step or all(trainer.get(name) == saved.get(name) for name in _LENGTH)


_LENGTH = ("max_steps", "max_epochs", "limit_train_batches", "overfit_batches")


def set_aside(run_dir: Path, folder: Path) -> None:
    """Moves the outcome of a run that goes on into the folder of its next part: it is not that of the run any more."""
    for name in ("results.json", "curve.png"):
        if (run_dir / name).exists():
            os.replace(run_dir / name, folder / name)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """A plain config with its data named from the root: a checkpoint means the same files in any folder."""
    changed = {"data": _absolute(config["data"])}
    if isinstance(sources := changed["data"].get("sources"), dict):  # of a mixture
        changed["data"]["sources"] = {name: _absolute(source) for name, source in sources.items()}
    if config["tokenizer"].get("_target_") == "samu_lm.data.shard_tokenizer":  # the shards' path
        changed["tokenizer"] = _absolute(config["tokenizer"])
    return config | changed


def _absolute(node: Mapping[str, Any]) -> dict[str, Any]:
    node = dict(node)
    for key in ("path", "cache_dir"):
        value = node.get(key)
        if isinstance(value, str):
            node[key] = str(launch_path(value))
        elif value is not None:
            node[key] = [str(launch_path(entry)) for entry in value]
    return node
