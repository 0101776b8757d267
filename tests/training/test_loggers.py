from __future__ import annotations

import importlib.util
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samu_lm.errors import ConfigError
from samu_lm.training.loggers import CSVLogger, ResumePoint, TensorBoardLogger, WandbLogger, cut_back, read_rows


def steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in read_rows(path)]


class TestCSV:
    def test_rows_come_as_they_are_logged(self, tmp_path: Path) -> None:
        logger = CSVLogger(run_dir=str(tmp_path))
        logger.log_metrics({"train/loss": 2.5}, 1)
        path = tmp_path / "logs" / "metrics.csv"
        assert read_rows(path) == [{"step": "1", "train/loss": "2.5"}]
        logger.log_metrics({"val/loss": 3.0}, 1)
        logger.log_metrics({"train/loss": 2.0}, 2)
        assert path.read_text().splitlines() == ["step,train/loss,val/loss", "1,2.5,", "1,,3.0", "2,2.0,"]

    def test_a_crash_at_212_resumed_from_200_is_one_log(self, tmp_path: Path) -> None:
        """The axis is the finished optimizer steps; nothing is dropped: what lay beyond is kept aside."""
        path = tmp_path / "logs" / "metrics.csv"
        logger = CSVLogger(run_dir=str(tmp_path))
        for step in range(1, 213):
            logger.log_metrics({"train/loss": 1 / step}, step)
        with path.open("a") as file:
            file.write("213,0.0")  # the crash cut this line off
        resumed = CSVLogger(run_dir=str(tmp_path), resumed=ResumePoint(200, validation_owed=False))
        for step in range(201, 221):
            resumed.log_metrics({"train/loss": 2 / step}, step)
        assert steps(path) == list(range(1, 221))
        assert float(read_rows(path)[-1]["train/loss"]) == 2 / 220
        aside = path.with_name("metrics.interrupted.csv")
        assert steps(aside) == list(range(201, 213))
        assert float(read_rows(aside)[-1]["train/loss"]) == 1 / 212

    def test_a_line_cut_off_by_a_crash_right_after_the_checkpoint(self, tmp_path: Path) -> None:
        """No whole row lies beyond the checkpoint, only a part of one: the next row begins a line of its own."""
        path = tmp_path / "logs" / "metrics.csv"
        logger = CSVLogger(run_dir=str(tmp_path))
        for step in (199, 200):
            logger.log_metrics({"train/loss": 1 / step}, step)
        with path.open("a") as file:
            file.write("201,0.00")
        resumed = CSVLogger(run_dir=str(tmp_path), resumed=ResumePoint(200, validation_owed=False))
        resumed.log_metrics({"train/loss": 0.5}, 201)
        assert [(row["step"], float(row["train/loss"])) for row in read_rows(path)][1:] == [
            ("200", 1 / 200),
            ("201", 0.5),
        ]

    def test_a_validation_that_is_done_again_is_moved_aside_too(self, tmp_path: Path) -> None:
        logger = CSVLogger(run_dir=str(tmp_path))
        logger.log_metrics({"train/loss": 1.0}, 5)
        logger.log_metrics({"val/loss": 2.0}, 5)
        assert cut_back(logger.path, ResumePoint(5, validation_owed=False)) is None
        assert cut_back(logger.path, ResumePoint(5, validation_owed=True)) is not None
        assert [row["train/loss"] for row in read_rows(logger.path)] == ["1.0"]

    def test_two_interruptions_are_both_kept(self, tmp_path: Path) -> None:
        logger = CSVLogger(run_dir=str(tmp_path))
        logger.log_metrics({"a": 1}, 9)
        cut_back(logger.path, ResumePoint(8, False))
        again = CSVLogger(run_dir=str(tmp_path))
        again.log_metrics({"a": 1, "b": 2}, 10)
        aside = cut_back(logger.path, ResumePoint(8, False))
        assert aside is not None
        assert read_rows(aside) == [{"step": "9", "a": "1", "b": ""}, {"step": "10", "a": "1", "b": "2"}]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
class TestWandb:
    @staticmethod
    def records(path: Path) -> Iterator[bytes]:
        """The records of a W&B file: LevelDB's log format after a header of 7 bytes, in blocks of 32 KiB."""
        content, place, whole = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            room = 2**15 - place % 2**15
            if room < 7:  # the rest of a block that holds no header
                place += room
                continue
            length, kind = struct.unpack_from("<HB", content, place + 4)
            whole += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a full record, or the last part of one
                yield whole
                whole = b""

    def history(self, run_dir: Path) -> list[dict[str, Any]]:
        from wandb.proto import wandb_internal_pb2

        found: list[dict[str, Any]] = []
        for path in sorted(run_dir.glob("logs/wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name):
            for data in self.records(path):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                    found.append({"file": path.name, **row})
        return found

    def test_a_crash_at_212_resumed_from_200_is_one_run_with_every_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        for first, last in ((1, 13), (11, 15)):  # rows of 200 + these
            logger = WandbLogger(run_dir=str(tmp_path))
            for step in range(200 + first, 200 + last):
                logger.log_metrics({"train/loss": 1 / step}, step)
            logger.finalize("success" if last == 15 else "failed")
            time.sleep(1.1)  # W&B names its folders by the second, and no run is resumed within one
        rows = self.history(tmp_path)
        assert [row["trainer/global_step"] for row in rows] == [*range(201, 213), *range(211, 215)]
        assert [row["_step"] for row in rows] == list(range(16))  # no row of the second part hides one of the first
        ids = {row["file"] for row in rows}
        assert len(ids) == 1
        assert json.loads((tmp_path / "logs" / "wandb.json").read_text())["rows"] == 16

    def test_offline_without_an_account(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        monkeypatch.setenv("HOME", str(tmp_path))
        assert WandbLogger(run_dir=str(tmp_path))._wandb_init["mode"] == "offline"
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        assert WandbLogger(run_dir=str(tmp_path))._wandb_init["mode"] == "online"
        assert WandbLogger(run_dir=str(tmp_path), mode="offline")._wandb_init["mode"] == "offline"

    def test_without_a_network_the_run_is_logged_offline_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing listens at the server's address: no hang, no lost row."""
        import wandb

        for name, value in {"API_KEY": "0" * 40, "BASE_URL": "http://127.0.0.1:9", "SILENT": "true"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        wandb.teardown()  # so that it reads the variables anew
        logger = WandbLogger(run_dir=str(tmp_path), mode="online", timeout=1.0)
        assert logger._wandb_init["settings"] == {"init_timeout": 1.0, "finish_timeout": 1.0}
        began = time.monotonic()
        for step in (1, 2):
            logger.log_metrics({"train/loss": 1 / step}, step)
        logger.finalize("success")
        assert time.monotonic() - began < 30
        while len(self.history(tmp_path)) < 2:  # W&B's own process may write on for a moment
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        assert "W&B cannot be reached (" in caplog.text
        assert [row["trainer/global_step"] for row in self.history(tmp_path)] == [1, 2]

    def test_refuses_a_timeout_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match=r"^logger\.wandb\.timeout=0\.0: must be positive"):
            WandbLogger(timeout=0.0)

    def test_refuses_an_unknown_mode(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^logger\.wandb\.mode=of: must be online, offline or null"):
            WandbLogger(run_dir=str(tmp_path), mode="of")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_hides_what_lay_beyond_the_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, rows in ((None, range(1, 6)), (ResumePoint(3, False), range(4, 7))):
        logger = TensorBoardLogger(run_dir=str(tmp_path), resumed=resumed)
        for step in rows:
            logger.log_metrics({"train/loss": float(step + (100 if resumed else 0))}, step)
        logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 104.0),
        (5, 105.0),
        (6, 106.0),
    ]


@pytest.mark.parametrize(("build", "package"), [(WandbLogger, "wandb"), (TensorBoardLogger, "tensorboard")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, build: Any, package: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^logger={package}: needs a package.*pip install 'samu-lm\[{package}\]'"):
        build()
