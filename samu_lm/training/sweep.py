"""Folders and tables of runs: what Hydra calls before and after its jobs."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from samu_lm.entry import make_run_folder, refused_in_one_line
from samu_lm.training.checks import refuse_overwriting

_RESULTS = ("global_step", "train/loss", "val/loss", "val/bits_per_byte", "targets_seen")
_current_sweep: Path | None = None


class RunFolders(Callback):
    """Guards the folders of runs before Hydra writes there, and notes the sweep that is to be tabulated.

    A new run over an old one's checkpoints is refused; a resumed run's first config is kept.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            resume, folder = config.get("resume"), Path(config.hydra.run.dir)
        except OmegaConfBaseException:  # a reference to a missing value; the error comes where the value is used
            return
        with refused_in_one_line():
            if resume is None:
                refuse_overwriting(folder)
            make_run_folder(config.hydra.run.dir)
        if resume is None or config.hydra.output_subdir is None:
            return
        own = folder / config.hydra.output_subdir
        if own.is_dir():
            number = 1 + len(list(own.glob("resume-*")))
            with read_write(config.hydra):
                config.hydra.output_subdir = f"{config.hydra.output_subdir}/resume-{number}"

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global _current_sweep
        with refused_in_one_line():
            make_run_folder(config.hydra.sweep.dir, "hydra.sweep.dir")
        _current_sweep = Path(config.hydra.sweep.dir).absolute()


def finish_sweep() -> None:
    """Writes and prints the table of the sweep that this process ran, if any; also after failed jobs."""
    global _current_sweep
    folder, _current_sweep = _current_sweep, None
    if folder is not None and (jobs := collect_jobs(folder)):
        print(write_table(folder, jobs), flush=True)


def collect_jobs(folder: Path) -> list[dict[str, Any]]:
    """One row for each job folder of a sweep: its overrides that differ between jobs, its status and results."""
    found = sorted((p for p in folder.iterdir() if (p / ".hydra").is_dir()), key=_by_number)
    overrides = {p: _overrides(p) for p in found}
    varying = dict.fromkeys(
        key
        for p in found
        for key, value in overrides[p].items()
        if any(o.get(key) != value for o in overrides.values())
    )
    return [{"job": p.name, **{key: overrides[p].get(key, "") for key in varying}, **_outcome(p)} for p in found]


def _by_number(path: Path) -> tuple[int, str]:
    digits = path.name.partition("_")[0]
    return (int(digits) if digits.isdigit() else 10**9, path.name)


def _overrides(job: Path) -> dict[str, str]:
    listed = OmegaConf.load(job / ".hydra" / "overrides.yaml")
    return dict(str(item).partition("=")[::2] for item in listed)


def _outcome(job: Path) -> dict[str, Any]:
    file = job / "results.json"
    results: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {"status": "failed"}
    return {"status": results["status"], **{name: results.get(name) for name in _RESULTS}}


def write_table(folder: Path, jobs: list[dict[str, Any]]) -> str:
    """Writes ``results.csv`` and ``results.md`` into a folder; returns the latter's text."""
    columns = list(jobs[0])
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(jobs)
    lines = [columns, ["---"] * len(columns), *([_cell(job[c]) for c in columns] for job in jobs)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    (folder / "results.md").write_text(text + "\n")
    return text


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value).replace("|", "\\|")
