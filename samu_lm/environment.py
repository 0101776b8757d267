"""What a recorded result says of its origin: versions, machine, source commit, command."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "samu-lm",
    "torch",
    "triton",
    "lightning",
    "hydra-core",
    "omegaconf",
    "numpy",
    "tokenizers",
    "datasets",
    "torchao",
)


def environment() -> dict[str, Any]:
    """Versions, machine, source commit and command of this process."""
    versions: dict[str, str | None] = {}
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
    root = Path(__file__).resolve().parents[1]
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
