"""What a run's folder says about the run: config, overrides, environment, results."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

PACKAGES = ("samu-lm", "torch", "triton", "lightning", "hydra-core", "omegaconf", "numpy", "tokenizers", "datasets")


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


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """Versions, machine, source commit and command of this process."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if devices else None,
        "devices": devices,
    }


def git_commit() -> str | None:
    """Commit of the source tree, with ``-dirty`` where files differ from it; None where it is no work tree of git."""
    root = Path(__file__).resolve().parents[2]
    if _git(root, "rev-parse", "--show-toplevel") != str(root):  # an installed copy inside somebody else's work tree
        return None
    return _git(root, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
