"""A step whose loss or gradient is not finite, or jumps: nothing of it stays, and it can be run again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.cli import main
from samu_lm.errors import ConfigError
from samu_lm.training import run as run_module
from samu_lm.training.callbacks import NonFiniteError
from samu_lm.training.loggers import read_rows
from samu_lm.training.replay import replay
from samu_lm.training.run import run
from tests.training.entry import train_py
from tests.training.support import differences, load, tiny_config, tiny_overrides, train_tiny, write_corpus

NAME = "model.blocks.0.mlp.gate.weight"
EACH_STEP = ["callbacks.last.every_n_steps=1", "schedule.total_steps=6", "trainer.val_check_interval=50"]


class Spoil(Callback):
    """Puts a value into a gradient at some steps."""

    def __init__(self, value: float, *steps: int) -> None:
        self.value, self.steps = value, steps

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            dict(module.named_parameters())[NAME].grad[0, :2] = self.value


class Overflow(Callback):
    """Makes a weight so large before a step that the forward pass overflows."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step + 1 == self.step:
            with torch.no_grad():
                module.get_parameter(NAME).fill_(3e38)


def last(folder: Path) -> dict[str, Any]:
    return load(folder / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_leaves_weights_optimizer_and_checkpoint_as_they_were(tmp_path: Path, value: float) -> None:
    corpus = write_corpus(tmp_path)
    train_tiny(tiny_config(corpus, *EACH_STEP, "trainer.max_steps=2"), tmp_path / "good")
    weights: dict[str, Any] = {}

    class Keep(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            weights.update({name: p.detach().clone() for name, p in module.state_dict().items()})

    with pytest.raises(NonFiniteError, match=rf"^step 3: the gradient of {NAME} has 2 of \d+ values that are NaN or"):
        train_tiny(tiny_config(corpus, *EACH_STEP), tmp_path / "bad", Spoil(value, 3), Keep())
    good, bad = last(tmp_path / "good"), last(tmp_path / "bad")
    assert bad["global_step"] == 2
    assert differences(bad["state_dict"], good["state_dict"]) == []
    assert differences(bad["optimizer_states"], good["optimizer_states"]) == []
    assert differences(weights, dict(good["state_dict"])) == []


def test_an_overflowing_norm_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=rf"^step 2: the norm of the gradient of {NAME} overflows float32"):
        train_tiny(tiny_config(write_corpus(tmp_path)), tmp_path / "run", Spoil(3e38, 2))


def test_the_status_is_3_and_the_line_names_step_tensor_and_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = run_module.build_trainer

    def with_overflow(*arguments: Any) -> Any:
        trainer = build(*arguments)
        trainer.callbacks.insert(0, Overflow(3))  # type: ignore[attr-defined]
        return trainer

    monkeypatch.setattr(run_module, "build_trainer", with_overflow)
    arguments = [*tiny_overrides(write_corpus(tmp_path)), *EACH_STEP, f"hydra.run.dir={tmp_path}/run"]
    assert train_py(monkeypatch, *arguments) == 3
    err = capsys.readouterr().err
    bundle = tmp_path / "run" / "bundles" / "step-3.pt"
    assert err.startswith("error: step 3: the loss is nan; the gradient of model.")
    assert err.endswith(f"; the weights are those of the step before; samu-lm replay {bundle}\n")
    assert "NonFiniteError: step 3" in (tmp_path / "run" / "train.log").read_text()
    assert last(tmp_path / "run")["global_step"] == 2
    # the step runs again and the first tensor is that of the layer with the large weight
    assert main(["replay", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 3: the loss is nan; ")
    assert "\nfirst tensor that is not finite: the output of model.blocks.0.mlp.gate (" in out
    assert "\n  weights:     all finite\n" in out
    assert "\n  gradients:   the gradient of model." in out
    assert "the same as then\n" in out


def test_a_skipped_step_changes_no_weight_and_no_moment(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            state = trainer.optimizers[0].state_dict()["state"]
            copied = {i: {k: v.clone() for k, v in s.items()} for i, s in state.items()}
            seen.append(({k: v.clone() for k, v in module.state_dict().items()}, copied))

    cfg = tiny_config(write_corpus(tmp_path), *EACH_STEP, "callbacks.guard.non_finite=skip")
    done = train_tiny(cfg, tmp_path / "run", Spoil(float("nan"), 3, 4), Watch())
    assert done.trainer.global_step == 6
    assert differences(seen[3], seen[1]) == []  # steps 3 and 4 were left out
    assert differences(seen[4], seen[3]) != []
    assert all(torch.isfinite(p).all() for p in done.module.parameters())
    rows = [row for row in read_rows(tmp_path / "run" / "logs" / "metrics.csv") if row["train/loss"]]
    assert [row["skipped_steps"] for row in rows] == ["", "", "1.0", "2.0", "2.0", "2.0"]
    assert sorted(p.name for p in (tmp_path / "run" / "bundles").iterdir()) == ["step-3.pt", "step-4.pt"]


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    settings = ["callbacks.guard.non_finite=skip", "callbacks.guard.max_skipped=2", "callbacks.guard.keep=1"]
    cfg = tiny_config(write_corpus(tmp_path), *EACH_STEP, *settings)
    with pytest.raises(NonFiniteError, match=r"^step 5: .* \(after 2 skipped steps in a row, callbacks\.guard\.max_"):
        train_tiny(cfg, tmp_path / "run", Spoil(float("nan"), 1, 3, 4, 5))
    assert [p.name for p in (tmp_path / "run" / "bundles").iterdir()] == ["step-5.pt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("loss", "the loss is "), ("norm", "the gradient's norm is ")],
)
def test_a_jump(tmp_path: Path, name: str, words: str) -> None:
    """The loss of step 5 is that of other weights, far from what the model has learnt."""

    class Jump(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    module.model.embedding.weight.mul_(30)

    settings = [f"callbacks.guard.{name}_factor=3", "callbacks.guard.window=4"]
    cfg = tiny_config(write_corpus(tmp_path), *EACH_STEP, *settings)
    with pytest.raises(NonFiniteError, match=rf"^step 5: {words}.* times the median .* of 4 steps \(callbacks\.guard"):
        train_tiny(cfg, tmp_path / "run", Jump())
    found = replay(tmp_path / "run" / "bundles" / "step-5.pt")
    assert found.first is None
    assert found.loss[0] == found.loss[1]  # the step runs again to the same bits
    assert found.norm[0] == found.norm[1]
    assert found.reproduced


def test_the_median_is_that_of_a_resumed_run(tmp_path: Path) -> None:
    settings = ["callbacks.guard.loss_factor=50", "callbacks.guard.window=3", "schedule.total_steps=6"]
    corpus = write_corpus(tmp_path)
    train_tiny(tiny_config(corpus, *settings), tmp_path / "straight")
    train_tiny(tiny_config(corpus, *settings, "trainer.max_steps=2"), tmp_path / "run")
    train_tiny(tiny_config(corpus, *settings, "trainer.max_steps=6", "resume=last"), tmp_path / "run")
    states = [last(tmp_path / which)["callbacks"]["StepGuard"] for which in ("straight", "run")]
    assert len(states[0]["recent"]["loss"]) == 3
    assert states[0] == states[1]


def test_accumulated_batches_are_replayed_together(tmp_path: Path) -> None:
    cfg = tiny_config(write_corpus(tmp_path), *EACH_STEP, "trainer.accumulate_grad_batches=3")
    with pytest.raises(NonFiniteError):
        train_tiny(cfg, tmp_path / "run", Overflow(2))
    assert len(load(tmp_path / "run" / "bundles" / "step-2.pt")["batches"]) == 3
    found = replay(tmp_path / "run" / "bundles" / "step-2.pt")
    assert found.reproduced
    assert found.first is not None and "mlp.gate" in found.first


def test_a_bundle_from_before_the_stream_s_key_is_replayed_with_a_float32_stream(tmp_path: Path) -> None:
    settings = ["model.residual_in_float32=true", "trainer.precision=bf16-mixed", "callbacks.guard.norm_factor=1.001"]
    cfg = tiny_config(write_corpus(tmp_path), *EACH_STEP, *settings, "callbacks.guard.window=2", "model.depth=4")
    with pytest.raises(NonFiniteError):
        train_tiny(cfg, tmp_path / "run")
    (path,) = (tmp_path / "run" / "bundles").glob("*.pt")
    content = load(path)
    del content["config"]["model"]["residual_in_float32"]
    torch.save(content, path)
    found = replay(path)
    assert found.loss[0] == found.loss[1]
    assert found.norm[0] == found.norm[1]


def test_a_fault_from_outside_the_step_does_not_show_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NonFiniteError):
        train_tiny(tiny_config(write_corpus(tmp_path), *EACH_STEP), tmp_path / "run", Spoil(float("nan"), 2))
    assert main(["replay", str(tmp_path / "run" / "bundles" / "step-2.pt"), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "first tensor that is not finite: none" in out
    assert "NOT the same as then" in out


@pytest.mark.parametrize("device", ["meta", "nowhere"])
def test_places_where_nothing_can_be_replayed(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NonFiniteError):
        train_tiny(tiny_config(write_corpus(tmp_path), *EACH_STEP), tmp_path / "run", Spoil(float("nan"), 2))
    assert main(["replay", str(tmp_path / "run" / "bundles" / "step-2.pt"), "--device", device]) == 2
    assert f"--device={device}: must be cpu, cuda, cuda:1 or auto" in capsys.readouterr().err


def test_a_full_disk_does_not_hide_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cfg = tiny_config(write_corpus(tmp_path))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(NonFiniteError, match=r"^step 2: .*the weights are those of the step before$"):
        train_tiny(cfg, tmp_path / "run", Spoil(float("nan"), 2))
    assert "no bundle of step 2 to replay: " in caplog.text
    assert "No space left on device" in caplog.text


def test_bundles_are_read_with_care(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    damaged = bytearray((tmp_path / "other.pt").read_bytes())
    damaged[damaged.index(b"state_dict")] ^= 1
    (tmp_path / "damaged.pt").write_bytes(damaged)
    for name, reason in (
        ("absent.pt", "no such file"),
        ("other.pt", "is no bundle of format 1"),
        ("damaged.pt", "is damaged in "),
    ):
        assert main(["replay", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"samu-lm replay: BUNDLE={tmp_path / name}: {reason}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("non_finite=ignore", r"^callbacks\.guard\.non_finite=ignore: must be stop or skip"),
        ("loss_factor=1", r"^callbacks\.guard\.loss_factor=1: must be above 1, or null"),
        ("window=0", r"^callbacks\.guard\.window=0: must be at least 1"),
        ("keep=-1", r"^callbacks\.guard\.keep=-1: must be at least 0"),
    ],
)
def test_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(write_corpus(tmp_path), f"callbacks.guard.{setting}"), tmp_path / "run")
