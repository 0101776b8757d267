"""Loggers whose files lie in the run's folder and go on, in place, when the run is resumed.

The step axis of all of them is the number of finished optimizer steps, the one that checkpoints carry.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import loggers
from lightning.pytorch.loggers.logger import rank_zero_experiment

from samu_lm.errors import ConfigError
from samu_lm.training.checkpoint_io import writing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """Where a resumed run takes up its log.

    Attributes:
        step: the checkpoint's optimizer step.
        validation_owed: the validation of that step is done again, too.
    """

    step: int
    validation_owed: bool


class CSVLogger(loggers.Logger):
    """Writes metrics to ``metrics.csv``, a row a step and kind (training or validation), as they come.

    Args:
        folder: folder of the file within the run's folder.
        run_dir: the run's folder.
        resumed: where a resumed run goes on; rows beyond it are moved aside before the first new one.
    """

    def __init__(self, folder: str = "logs", run_dir: str = ".", resumed: ResumePoint | None = None) -> None:
        super().__init__()
        self.path = Path(run_dir).absolute() / folder / "metrics.csv"
        self._columns: list[str] | None = None
        self._resumed = resumed

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return self.save_dir

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run's folder holds the whole config."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends a row; a metric never seen before adds a column, for which the file is written anew.

        Raises:
            WriteError: the file cannot be written.
        """
        with writing(self.path):
            self._append({"step": step, **metrics})

    def _append(self, row: dict[str, Any]) -> None:
        if self._columns is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._resumed is not None and (aside := cut_back(self.path, self._resumed)):
                log.info("rows that the interrupted run had logged beyond its checkpoint were moved to %s", aside)
            self._columns = read_columns(self.path)
        if new := [name for name in row if name not in self._columns]:
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            _write_rows(self.path, self._columns, read_rows(self.path))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)


def read_columns(path: Path) -> list[str]:
    """Columns of a metrics file; none where it does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics file as text by column; none where it does not exist. A last line cut off by a crash is left
    out."""
    if not path.is_file():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(whole.splitlines()))


def _write_rows(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def cut_back(path: Path, point: ResumePoint) -> Path | None:
    """Makes a metrics file end where a checkpoint was written, since the resumed run logs what follows again.

    Args:
        path: ``metrics.csv``.
        point: the checkpoint's place.

    Returns:
        The file beside it to which the rows beyond were moved (appended), or None where there were none.
    """
    rows = read_rows(path)
    kept: list[dict[str, str]] = []
    beyond: list[dict[str, str]] = []
    for row in rows:
        place = int(row["step"])
        again = place > point.step or (point.validation_owed and place == point.step and bool(row.get("val/loss")))
        (beyond if again else kept).append(row)
    columns = read_columns(path)
    if not beyond:
        if path.is_file() and not path.read_bytes().endswith(b"\n"):  # a last line cut off by a crash: it comes again
            _write_rows(path, columns, kept)
        return None
    aside = path.with_name("metrics.interrupted.csv")
    earlier = read_rows(aside)
    _write_rows(aside, [*columns, *(c for c in read_columns(aside) if c not in columns)], earlier + beyond)
    _write_rows(path, columns, kept)
    return aside


class TensorBoardLogger(loggers.TensorBoardLogger):
    """TensorBoard's event files, in a folder of the run's folder; a resumed run adds a file.

    Args:
        folder: folder of the files within the run's folder.
        run_dir: the run's folder.
        resumed: where a resumed run goes on; TensorBoard hides what an interrupted run had logged beyond it.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(self, folder: str = "logs", run_dir: str = ".", resumed: ResumePoint | None = None) -> None:
        _require("tensorboard")
        purge_step = None if resumed is None else resumed.step + 1
        folder = str(Path(run_dir).absolute() / folder)
        super().__init__(save_dir=folder, name="", version="", default_hp_metric=False, purge_step=purge_step)


class WandbLogger(loggers.WandbLogger):
    """Weights & Biases: one run, offline unless there is an account, continued by a resumed run.

    The run's id and the number of rows sent lie in ``wandb.json`` in the run's folder, so that a resumed run adds to
    the same run after the rows that are there. The axis is ``trainer/global_step``; steps that an interrupted run
    logged beyond its checkpoint are logged a second time and both stay. Where the server cannot be reached when the run
    begins, a warning says so and the run is logged offline.

    Args:
        folder: folder of the files within the run's folder.
        project: W&B project.
        name: display name; None uses the run folder's.
        timeout: seconds to wait for the server when the run begins, and for the upload when it ends; what is not
            uploaded then lies in the run's folder, for `wandb sync`.
        mode: online or offline; None is ``WANDB_MODE`` where set, else online with an account and offline without.
        run_dir: the run's folder.

    Raises:
        ConfigError: the package is missing, or the mode is not one of these.
    """

    def __init__(
        self,
        folder: str = "logs",
        project: str = "samu_lm",
        name: str | None = None,
        mode: str | None = None,
        timeout: float = 60.0,
        run_dir: str = ".",
    ) -> None:
        _require("wandb")
        if not timeout > 0:
            raise ConfigError("logger.wandb.timeout", timeout, "must be positive")
        if mode not in (None, "online", "offline"):
            raise ConfigError("logger.wandb.mode", mode, "must be online, offline or null")
        if mode is None:
            mode = os.environ.get("WANDB_MODE") or ("online" if _has_account() else "offline")
        save_dir = Path(run_dir).absolute() / folder
        save_dir.mkdir(parents=True, exist_ok=True)
        self._record = save_dir / "wandb.json"
        record = json.loads(self._record.read_text()) if self._record.is_file() else {}
        self._run_id: str = record.get("id") or uuid.uuid4().hex[:8]
        self._rows: int = record.get("rows", 0)
        super().__init__(
            name=name or Path(run_dir).absolute().name,
            save_dir=str(save_dir),
            id=self._run_id,
            project=project,
            mode=mode,
            settings={"init_timeout": timeout, "finish_timeout": timeout} if mode == "online" else {},
            reinit="finish_previous",  # the jobs of a sweep share a process, but not a run
        )
        self._wandb_init.pop("anonymous")  # W&B warns of it even where it is not used

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run."""
        import wandb
        from wandb.errors import CommError

        try:
            return super().experiment
        except CommError as error:
            reason = str(error).strip().splitlines()[0]
            log.warning("W&B cannot be reached (%s): logged offline below %s, for wandb sync", reason, self.save_dir)
            wandb.teardown()  # what the attempt left keeps the run's id
            self._wandb_init.update(mode="offline", settings={})  # nothing to wait for but the disk
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        # Rows are numbered by ourselves: an offline run would begin again at 0 and, once synced, overwrite.
        self.experiment.log({**metrics, "trainer/global_step": step}, step=self._rows)
        self._rows += 1
        with writing(self._record):
            partial = self._record.with_name(f".{self._record.name}.partial")
            partial.write_text(json.dumps({"id": self._run_id, "rows": self._rows}))
            os.replace(partial, self._record)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)


def _has_account() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    return False


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError("logger", package, f"needs a package that is not installed: pip install 'samu-lm[{package}]'")
