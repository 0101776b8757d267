"""Learning rate, throughput, MFU, memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from samu_lm.errors import ConfigError
from samu_lm.training.callbacks import Memory, ModelFlopsUtilisation, Throughput
from samu_lm.training.callbacks import mfu as mfu_module
from samu_lm.training.callbacks import throughput as throughput_module
from samu_lm.training.callbacks.memory import GIB, peak_rss_bytes
from samu_lm.training.callbacks.mfu import peak_flops
from samu_lm.training.loggers import read_rows
from samu_lm.training.module import TrainingModule
from tests.training.support import tiny_config, train_tiny, write_corpus


class Recorder(TrainingModule):
    """A training module that keeps what callbacks log, and counts targets as it is told."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.logged: dict[str, float] = {}
        self._targets_seen: float = 0.0
        self.row_tokens_seen = 0
        self.model: Any = SimpleNamespace(flops_per_token=lambda training: 600)

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged[name] = float(value)


def trainer_at(step: int, **options: Any) -> Any:
    loop = SimpleNamespace(_should_accumulate=lambda: False)
    known = {"global_step": step, "log_every_n_steps": 10, "max_steps": 1000, "fit_loop": loop, "world_size": 1}
    return SimpleNamespace(**(known | options))


def test_speeds_count_targets_and_row_tokens_without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput_module.time, "perf_counter", lambda: clock.now)
    module, callback = Recorder(), Throughput()
    callback.on_train_start(trainer_at(0), module)
    clock.now += 3
    callback.on_validation_start(trainer_at(5), module)
    clock.now += 50
    callback.on_validation_end(trainer_at(5), module)
    clock.now += 1
    module._targets_seen, module.row_tokens_seen = 200.0, 400
    callback.on_train_batch_end(trainer_at(9), module, None, None, 9)
    assert not module.logged
    callback.on_train_batch_end(trainer_at(10), module, None, None, 10)
    assert module.logged == {"tokens_per_second": 50.0, "raw_tokens_per_second": 100.0}
    clock.now += 2
    module._targets_seen, module.row_tokens_seen = 300.0, 440
    callback.on_train_batch_end(trainer_at(20), module, None, None, 20)
    assert module.logged == {"tokens_per_second": 50.0, "raw_tokens_per_second": 20.0}


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16-mixed", 9.89e14),
        ("NVIDIA H100 PCIe", "bf16-mixed", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 3.12e14),
        ("NVIDIA H200", "32-true", None),
        ("Some Other GPU", "bf16-mixed", None),
    ],
)
def test_peaks(monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), precision) == peak


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), "bf16-mixed") is None


def test_mfu_is_flops_over_peak_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu_module, "peak_flops", lambda device, precision: 1e5)
    module, callback = Recorder(), ModelFlopsUtilisation()
    options = {"precision": "bf16-mixed", "callbacks": [Throughput()], "world_size": 2}
    callback.on_train_start(trainer_at(0, **options), module)
    trainer = trainer_at(10, callback_metrics={"raw_tokens_per_second": torch.tensor(100.0)}, **options)
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert module.logged == {"mfu": pytest.approx(100 * 600 / 2e5)}


def test_mfu_needs_throughput() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.mfu=set: needs callbacks\.throughput"):
        ModelFlopsUtilisation().on_train_start(trainer_at(0, callbacks=[], precision="bf16-mixed"), Recorder())


def test_memory_of_a_cpu_is_the_resident_set() -> None:
    module = Recorder()
    Memory().on_train_batch_end(trainer_at(10), module, None, None, 0)
    assert module.logged == {"memory/rss": pytest.approx(peak_rss_bytes() / GIB, rel=0.2)}
    assert 0.05 < module.logged["memory/rss"] < 100


def test_a_run_logs_them(tmp_path: Path) -> None:
    done = train_tiny(tiny_config(write_corpus(tmp_path)), tmp_path / "run")
    rows = [row for row in read_rows(tmp_path / "run" / "logs" / "metrics.csv") if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    schedule = done.plan.schedule
    expected = [done.plan.optimizer.lr * schedule.factor(step, 6) for step in range(6)]
    assert [float(row["lr"]) for row in rows] == pytest.approx(expected, rel=1e-12)
    assert all(float(row[name]) > 0 for row in rows for name in ("tokens_per_second", "raw_tokens_per_second"))
    assert all(float(row["memory/rss"]) > 0 for row in rows)
    assert "mfu" not in rows[0]
