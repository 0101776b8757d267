"""A checkpoint that the trainer wrote: evaluation repeats its last validation, compiled or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from samu_lm.config import config_dir
from samu_lm.training.run import run as train
from tests.evaluation.making import run, write_corpus

MAX_STEPS = 4
SHORT = [
    "experiment=smoke",
    "data.max_bytes=30000",
    "schedule.warmup_steps=1",
    "logger=none",
    "trainer.limit_val_batches=null",
]


@pytest.fixture(scope="module", params=["samu_tiny", "rglru_tiny", "gated_delta_tiny"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run's folder and its results."""
    folder = tmp_path_factory.mktemp("trained")
    overrides = [*SHORT, f"model={request.param}", f"trainer.max_steps={MAX_STEPS}"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("train", overrides)
    return folder, train(cfg, folder, overrides)


def test_evaluation_repeats_the_validation(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, results = trained
    outcome = run(folder / "checkpoints" / "last.ckpt", tmp_path / "out")
    assert outcome["step"] == MAX_STEPS
    assert outcome["nats_per_token"] == pytest.approx(results["val/loss"], rel=1e-6)
    assert outcome["bits_per_byte"] == pytest.approx(results["val/bits_per_byte"], rel=1e-6)


def test_prompt_is_continued(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = trained
    greedy = ("prompt='import os'", "max_new_tokens=8", "temperature=0")
    first = run(folder / "checkpoints" / "last.ckpt", tmp_path / "a", *greedy)
    assert run(folder / "checkpoints" / "last.ckpt", tmp_path / "b", *greedy)["samples"] == first["samples"]
    assert first["samples"][0]["text"].startswith("import os")


def test_trained_compiled_evaluates_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.compile
    # Traced as for inductor, without building code from the trace.
    monkeypatch.setattr(torch, "compile", lambda function, backend="": original(function, backend="eager"))
    overrides = [*SHORT, "model.depth=1", "trainer.max_steps=2", "compile=true"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        results = train(compose("train", overrides), tmp_path / "run", overrides)
    plain = run(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "plain")
    assert plain["nats_per_token"] == pytest.approx(results["val/loss"], rel=1e-5)


def test_relative_data_path_means_the_folder_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    write_corpus(Path("texts"), documents=8)
    overrides = [
        *SHORT[2:],
        "data=text",
        "data.path=texts",
        "data.val_fraction=0.4",
        *("model.width=16", "model.rnn_width=32", "model.depth=1", "trainer=cpu", "trainer.max_steps=2"),
    ]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        results = train(compose("train", overrides), Path("run"), overrides)
    monkeypatch.chdir(tmp_path)
    outcome = run(Path("there/run/checkpoints/last.ckpt"), Path("out"))
    assert outcome["nats_per_token"] == pytest.approx(results["val/loss"], rel=1e-5)
    assert str(tmp_path / "there" / "texts") in outcome["data"]
