"""Runs with the blocks' matrix products in float8, emulated: the key's way to the model, checkpoints, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, open_dict

from samu_lm.checkpoint import read_checkpoint
from samu_lm.checkpoint.export import export
from samu_lm.data import LMDataModule
from samu_lm.errors import ConfigError
from samu_lm.evaluation.build import build_model
from samu_lm.evaluation.checkpoint import load_checkpoint
from samu_lm.model.fp8 import projections
from samu_lm.training.callbacks.guard import NonFiniteError
from samu_lm.training.checks import check
from samu_lm.training.loggers import read_rows
from samu_lm.training.replay import replay
from samu_lm.training.run import run
from tests.training.support import load, tiny_config, tiny_overrides, train_tiny, write_corpus
from tests.training.warm import Warm

BFLOAT16 = "trainer.precision=bf16-mixed"


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of torchao's linear map in float8, emulated."""
    monkeypatch.setenv("SAMU_LM_FP8_EMULATE", "1")
    return pytest.importorskip("torchao.float8.float8_linear")


def losses(run_dir: Path) -> list[float]:
    return [float(row["train/loss"]) for row in read_rows(run_dir / "logs" / "metrics.csv") if row["train/loss"]]


def kinds(module: Any) -> set[type]:
    return {type(linear) for linear in projections(module.model).values()}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_key_reaches_the_model(float8: Any, tmp_path: Path, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "samu_lm")
    corpus = write_corpus(tmp_path)
    done = train_tiny(tiny_config(corpus, BFLOAT16, f"fp8={recipe}"), tmp_path / "run")
    plain = train_tiny(tiny_config(corpus, BFLOAT16), tmp_path / "plain")
    assert kinds(done.module) == {float8.Float8Linear}
    assert f"6 linear maps multiply in float8, {recipe} (emulated)" in caplog.text
    assert kinds(plain.module) == {torch.nn.Linear}
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=0.02)


def test_a_checkpoint_is_like_any_other(float8: Any, tmp_path: Path) -> None:
    """Its names, shapes and types are those without float8; it goes on either way, and is exported and evaluated."""
    corpus = write_corpus(tmp_path)
    common = [BFLOAT16, "schedule.total_steps=9", "callbacks.last.every_n_steps=0"]

    def part(steps: int, *settings: str) -> Any:
        overrides = [*common, f"trainer.max_steps={steps}", *settings]
        return train_tiny(tiny_config(corpus, *overrides), tmp_path / "run", overrides=overrides)

    part(3, "fp8=rowwise")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    plain = train_tiny(tiny_config(corpus, BFLOAT16), tmp_path / "plain")
    weights, others = load(last)["state_dict"], plain.module.state_dict()
    assert {n: (w.shape, w.dtype) for n, w in weights.items()} == {n: (w.shape, w.dtype) for n, w in others.items()}
    assert kinds(part(5, "resume=last").module) == {float8.Float8Linear}  # the checkpoint's
    assert kinds(part(7, "resume=last", "fp8=none").module) == {torch.nn.Linear}
    assert kinds(part(9, "resume=last", "fp8=tensorwise").module) == {float8.Float8Linear}
    assert len(losses(tmp_path / "run")) == 9
    export(last, tmp_path / "exported")
    for path in (last, tmp_path / "exported"):
        checkpoint = load_checkpoint(path)
        model = build_model(checkpoint, plain.module.tokenizer, {})
        assert {type(linear) for linear in projections(model).values()} == {torch.nn.Linear}
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, load(last)["state_dict"][f"model.{name}"]), name


def test_a_config_from_before_the_key(tmp_path: Path) -> None:
    def without_key(*overrides: str) -> DictConfig:
        cfg = tiny_config(corpus, *overrides)
        with open_dict(cfg):
            del cfg.fp8
        return cfg

    corpus = write_corpus(tmp_path)
    check(without_key())
    train_tiny(without_key("trainer.max_steps=2", "schedule.total_steps=4"), tmp_path / "run")
    again = tiny_config(corpus, "trainer.max_steps=4", "schedule.total_steps=4", "resume=last")
    done = train_tiny(again, tmp_path / "run", overrides=["trainer.max_steps=4"])
    assert done.trainer.global_step == 4


def test_compiled(float8: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, backend: compiled(function, backend="aot_eager"))
    corpus = write_corpus(tmp_path)
    settings = [BFLOAT16, "fp8=rowwise", "trainer.max_steps=3", "model.activation_checkpointing=selective"]
    train_tiny(tiny_config(corpus, *settings, "compile=true"), tmp_path / "compiled")
    train_tiny(tiny_config(corpus, *settings), tmp_path / "plain")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=5e-3)


def test_a_step_is_replayed_as_it_was(float8: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Jump(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    module.model.embedding.weight.mul_(30)

    guard = ["callbacks.guard.loss_factor=3", "callbacks.guard.window=4"]
    with pytest.raises(NonFiniteError):
        train_tiny(tiny_config(write_corpus(tmp_path), BFLOAT16, "fp8=rowwise", *guard), tmp_path / "run", Jump())
    bundle = tmp_path / "run" / "bundles" / "step-5.pt"
    found = replay(bundle)
    assert found.differs is None
    assert found.loss[0] == found.loss[1]
    monkeypatch.delenv("SAMU_LM_FP8_EMULATE")
    found = replay(bundle, "cpu")
    assert found.loss[0] != found.loss[1]
    assert "not as in the run: without float8 products; fp8=rowwise: needs a GPU" in "\n".join(found.lines())


@pytest.mark.slow
def test_in_shards(float8: Any, tmp_path: Path) -> None:
    """Two ranks with the weights cut over them take the steps of one."""
    corpus = write_corpus(tmp_path)
    common = [*tiny_overrides(corpus), BFLOAT16, "fp8=tensorwise", "trainer.max_steps=3"]
    common.remove("trainer=cpu")
    warm = Warm()
    try:
        output = tmp_path / "output"
        two = ["trainer=sharded", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=1"]
        assert warm.train([*common, *two, f"hydra.run.dir={tmp_path}/two"], output, ranks=2) == [0, 0], (
            output.read_text()[-4000:]
        )
    finally:
        warm.close()
    train_tiny(tiny_config(corpus, BFLOAT16, "fp8=tensorwise", "trainer.max_steps=3"), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=5e-3)
    found = read_checkpoint(tmp_path / "two" / "checkpoints" / "last.ckpt", "resume")["state_dict"]
    expected = load(tmp_path / "one" / "checkpoints" / "last.ckpt")["state_dict"]
    assert {n: (w.shape, w.dtype) for n, w in found.items()} == {n: (w.shape, w.dtype) for n, w in expected.items()}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fp8=fp8"], r"^fp8=fp8: must be one of none, tensorwise, rowwise"),
        (["fp8=true"], r"^fp8=True: must be one of none, tensorwise, rowwise"),
        (["fp8=rowwise"], r"^fp8=rowwise: needs a GPU of compute capability 8\.9 or higher, which cpu"),
        (
            ["fp8=rowwise", BFLOAT16, "model.width=40"],
            r"^model\.width=40: fp8=rowwise needs a multiple of 16; try 48, or use fp8=none",
        ),
        (
            ["fp8=tensorwise", BFLOAT16, "model.rnn_width=24"],
            r"^model\.rnn_width=24: fp8=tensorwise needs a multiple of 16; try 32",
        ),
        (
            ["fp8=tensorwise", BFLOAT16, "data.seq_len=20"],
            r"^data\.seq_len=20: with data\.batch_size=2, fp8=tensorwise needs a multiple of 16; try 32",
        ),
        (["fp8=rowwise", BFLOAT16], r"^fp8=rowwise: needs a GPU of compute capability 8\.9 or higher, which cpu"),
    ],
)
def test_refused_before_data_is_read_or_anything_is_written(
    tmp_path: Path, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(self: Any, stage: str | None = None) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(LMDataModule, "setup", setup)
    with pytest.raises(ConfigError, match=message) as error:
        run(tiny_config(write_corpus(tmp_path), *overrides), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_float32_is_refused(float8: Any, tmp_path: Path) -> None:
    message = r"^trainer\.precision=32-true: fp8=rowwise needs bf16-mixed or bf16-true; or use fp8=none"
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(write_corpus(tmp_path), "fp8=rowwise"), tmp_path / "run")
