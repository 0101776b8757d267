"""Keys that say ``auto``, and the log's lines about devices and backends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from samu_lm.model import RecurrentLM
from samu_lm.training.hardware import announce, settle
from tests.training.support import load, tiny_config, train_tiny, write_corpus


def config(**trainer: Any) -> Any:
    return OmegaConf.create({"compile": "auto", "trainer": {"precision": "auto", "accelerator": "auto", **trainer}})


def settled(cfg: Any) -> tuple[Any, Any]:
    done = settle(cfg)
    return done.compile, done.trainer.precision


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = request.param if isinstance(request.param, list) else [request.param]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[device])


@pytest.mark.parametrize("gpu", [(8, 0), (9, 0)], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_a_gpu_trains_compiled_in_bfloat16_unless_told_otherwise() -> None:
    assert settled(config()) == (True, "bf16-mixed")
    assert settled(config(accelerator="gpu")) == (True, "bf16-mixed")
    assert settled(config(accelerator="cpu")) == (False, "32-true")
    assert settled(config(precision="32-true")) == (True, "32-true")
    own = config()
    own.compile = False
    assert settled(own) == (False, "bf16-mixed")
    assert own.trainer.precision == "auto"


@pytest.mark.parametrize("gpu", [(7, 5), [(9, 0), (7, 5)]], ids=str, indirect=True)
@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_bfloat16_units_does_not() -> None:
    assert settled(config()) == (False, "32-true")


def test_a_run_on_a_cpu_records_what_auto_came_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="samu_lm"):
        train_tiny(tiny_config(write_corpus(tmp_path), "compile=auto", "trainer.precision=auto"), tmp_path / "run")
    saved = load(tmp_path / "run" / "checkpoints" / "last.ckpt")["samu_lm"]["config"]
    assert saved["compile"] is False
    assert saved["trainer"]["precision"] == "32-true"
    assert "device: cpu, precision 32-true, compile False" in caplog.text


@pytest.mark.parametrize(("mixer", "op"), [("samu", "samu"), ("rglru", "rglru"), ("gated_delta", "gated_delta_rule")])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_op_says_where_it_runs(
    mixer: str, op: str, backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samu_lm.ops.backend._told", set())
    model = RecurrentLM(64, 16, 32, 2, mixer, backend=backend)
    with caplog.at_level(logging.INFO, logger="samu_lm"):
        announce(model, torch.device("cpu"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" runs on backend=reference")[0] for line in lines] == sorted(
        ["causal_conv1d", "cross_entropy", "gated_gelu", "residual_norm", op]
    )
