"""What a training run's folder says of it: config, outcome, environment and the series that it logged."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from samu_lm.errors import ConfigError

METRICS = (Path("logs/metrics.csv"), Path("metrics.csv"))
# Keys of a config that say where and how a run was kept, not what it computed.
_PLACES = ("hydra", "logger", "callbacks", "resume")


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        name: the folder, as short as tells it from the others.
        folder: where it lies.
        series: logged name to ``(step, value)`` pairs, steps in the order of the file.
        config: dotted key to value; empty without a config.
        results, environment, evaluation: the JSON files of those names; empty where absent.
        resumed_at: steps that the run went on from.
    """

    name: str
    folder: Path
    series: dict[str, list[tuple[int, float]]]
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    resumed_at: tuple[int, ...] = ()

    def last(self, name: str) -> float | None:
        """The last value logged under a name."""
        points = self.series.get(name)
        return points[-1][1] if points else None

    def median(self, name: str) -> float | None:
        """The middle value logged under a name; the first one, which holds the warm-up, only if it is alone."""
        values = sorted(value for _, value in self.series.get(name, ())[1:] or self.series.get(name, ()))
        return values[len(values) // 2] if values else None

    def not_finite(self) -> list[int]:
        """Steps at which the training loss was not a number or infinite."""
        return [step for step, value in self.series.get("train/loss", ()) if not math.isfinite(value)]


def find_runs(paths: list[Path]) -> list[Run]:
    """The runs of folders: a run's own, or one whose sub-folders are runs (a sweep's).

    Raises:
        ConfigError: a folder does not exist or holds no run, or a run's log cannot be read.
    """
    folders: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ConfigError("RUN", path, "no such folder; give a run's folder, or a sweep's")
        inside = [path] if _metrics(path) else sorted((p for p in path.iterdir() if _metrics(p)), key=_natural)
        if not inside:
            raise ConfigError("RUN", path, "holds no run: neither it nor a folder in it has logs/metrics.csv")
        folders += inside
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    return [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Reads one run.

    Raises:
        ConfigError: a file of the folder is damaged.
    """
    metrics = _metrics(folder)
    assert metrics is not None
    config = folder / "config.yaml"
    resumed = [p.name.removeprefix("step-") for p in (folder / "resumed").glob("step-*")]
    try:
        return Run(
            name,
            folder,
            _series(metrics),
            _flat(yaml.safe_load(config.read_text(encoding="utf-8"))) if config.is_file() else {},
            _json(folder / "results.json"),
            _json(folder / "environment.json"),
            _json(folder / "evaluation.json"),
            tuple(sorted(int(step) for step in resumed if step.isdecimal())),
        )
    except (ValueError, KeyError, OSError, csv.Error, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("RUN", folder, f"cannot be read ({reason}); give a folder that train.py wrote") from error


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Config keys in which the runs differ, with each run's value (None where it has no such key)."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    found = {key: [run.config.get(key) for run in runs] for key in keys if not key.startswith(_PLACES)}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _metrics(folder: Path) -> Path | None:
    return next((folder / name for name in METRICS if (folder / name).is_file()), None)


def _natural(path: Path) -> tuple[int, str]:
    return (int(path.name), "") if path.name.isdecimal() else (-1, path.name)


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell all of them apart."""
    for parts in range(1, 1 + max((len(folder.parts) for folder in folders), default=1)):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _series(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    series: dict[str, list[tuple[int, float]]] = {}
    with metrics.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            step = int(float(row["step"]))
            for name, value in row.items():
                if name not in ("step", None) and value:
                    series.setdefault(name, []).append((step, float(value)))
    return series


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no object")
    for name, kind in (("parameters", int), ("packages", dict), ("command", list), ("by_position", list)):
        if name in content and not isinstance(content[name], kind):
            raise ValueError(f"{path.name} holds {name}={content[name]!r}")
    return content


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, Mapping):
        return {prefix.removesuffix("."): config} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat
