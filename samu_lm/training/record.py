"""What a run's folder says about the run: config, overrides, environment, results."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

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


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
