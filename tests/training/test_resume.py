"""A run that is stopped and resumed equals the run that never was, bit for bit (on the CPU)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.errors import ConfigError
from samu_lm.training.callbacks import GracefulStop
from samu_lm.training.loggers import read_rows
from samu_lm.training.loop import validation_owed
from samu_lm.training.record import read_results, write_json
from samu_lm.training.resume import find_checkpoint, merge_config
from samu_lm.training.run import run
from tests.training.support import Finished, differences, load, tiny_config, train_tiny, write_corpus
from tests.training.test_stop import add_callback

SECONDS = ("tokens_per_second", "raw_tokens_per_second", "memory/rss")


class SignalAfterStep(Callback):
    """Sends SIGTERM to this process when an optimizer step is finished."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class SignalInValidation(SignalAfterStep):
    """Sends SIGTERM to this process inside the validation of an optimizer step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None: ...

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        if trainer.global_step == self.step and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Draws(Callback):
    """Notes what each step is trained on and draws from PyTorch's generator, as dropout would."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, batch_idx, batch.tokens.tolist(), float(torch.rand(()))))

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        self.seen.append((trainer.global_step, "validation", batch_idx, float(torch.rand(()))))


def logged(run_dir: Path) -> list[dict[str, str]]:
    rows = read_rows(run_dir / "logs" / "metrics.csv")
    return [{k: v for k, v in row.items() if k not in SECONDS} for row in rows]


def straight_and_resumed(
    tmp_path: Path, settings: list[str], stops: list[SignalAfterStep]
) -> tuple[Finished, Finished]:
    """Trains once in one go and once with the stops, and compares everything that the two left behind."""
    corpus = write_corpus(tmp_path, documents=5)
    settings = [*settings, "data.seq_len=64"]
    straight_seen: list[Any] = []
    resumed_seen: list[Any] = []
    straight = train_tiny(tiny_config(corpus, *settings), tmp_path / "straight", Draws(straight_seen))
    for number, stop in enumerate(stops):
        cfg = tiny_config(corpus, *settings, *(["resume=last"] if number else []))
        part: list[Any] = []
        with pytest.raises(GracefulStop) as stopped:
            train_tiny(cfg, tmp_path / "resumed", Draws(part), stop)
        assert stopped.value.code == 128 + signal.SIGTERM
        assert load(tmp_path / "resumed" / "checkpoints" / "last.ckpt")["global_step"] == stop.step
        resumed_seen += part
    part = []
    resumed = train_tiny(tiny_config(corpus, *settings, "resume=last"), tmp_path / "resumed", Draws(part))
    resumed_seen += part
    for name in ("last", "best"):
        files = [load(tmp_path / which / "checkpoints" / f"{name}.ckpt") for which in ("straight", "resumed")]
        assert differences(*files) == []
    assert logged(tmp_path / "resumed") == logged(tmp_path / "straight")
    expected = dict(straight.results)
    if stops[-1].step == straight.trainer.global_step:  # nothing was trained any more, only validated
        del expected["train/loss"]
    assert resumed.results == expected
    if not any(isinstance(stop, SignalInValidation) for stop in stops):  # those validate some batches twice
        assert resumed_seen == straight_seen
    return straight, resumed


EPOCHS = ["trainer.max_steps=-1", "trainer.max_epochs=4"]
EACH_EPOCH = [*EPOCHS, "trainer.check_val_every_n_epoch=1", "trainer.val_check_interval=1.0"]
N = 6  # batches an epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_at_steps_10_and_20_of_30(tmp_path: Path, workers: int) -> None:
    settings = ["trainer.max_steps=30", "trainer.val_check_interval=14", f"data.num_workers={workers}"]
    straight, _ = straight_and_resumed(tmp_path, settings, [SignalAfterStep(10), SignalAfterStep(20)])
    assert straight.trainer.num_training_batches == N
    assert straight.trainer.global_step == 30


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        pytest.param(EACH_EPOCH, [SignalAfterStep(N + 3), SignalAfterStep(2 * N + 2)], id="inside-epochs"),
        pytest.param(EACH_EPOCH, [SignalAfterStep(N), SignalAfterStep(2 * N)], id="at-epochs-ends-before-validation"),
        pytest.param(EPOCHS, [SignalAfterStep(N), SignalAfterStep(N + 1)], id="at-an-epoch's-end-and-right-after"),
        pytest.param(EACH_EPOCH, [SignalInValidation(N), SignalInValidation(3 * N)], id="in-validation-at-epochs-ends"),
        pytest.param(EPOCHS, [SignalInValidation(4), SignalInValidation(8)], id="in-validation"),
        pytest.param(EACH_EPOCH, [SignalAfterStep(4 * N), SignalInValidation(4 * N)], id="at-the-last-epoch's-end"),
        pytest.param(
            [*EACH_EPOCH, "trainer.accumulate_grad_batches=2"],
            [SignalAfterStep(2), SignalAfterStep(6), SignalInValidation(9)],
            id="accumulating-with-a-short-last-window",
        ),
        pytest.param(
            [*EPOCHS, "trainer.accumulate_grad_batches=3"],
            [SignalAfterStep(1), SignalInValidation(2)],
            id="validation-due-between-accumulated-batches",
        ),
        pytest.param(
            [*EACH_EPOCH, "model=gated_delta_tiny"],
            [SignalAfterStep(N + 3), SignalAfterStep(2 * N + 2)],
            id="gated-delta",
        ),
    ],
)
def test_stopped_and_resumed_twice(tmp_path: Path, settings: list[str], stops: list[SignalAfterStep]) -> None:
    straight, _ = straight_and_resumed(tmp_path, settings, stops)
    assert straight.trainer.current_epoch == 4
    assert straight.plan.data.rows_consumed == 4 * straight.plan.data.rows_per_epoch


def test_stopped_before_the_validation_of_the_last_step(tmp_path: Path) -> None:
    settings = ["trainer.max_steps=8", "trainer.val_check_interval=3"]
    straight_and_resumed(tmp_path, settings, [SignalAfterStep(8), SignalInValidation(8)])
    assert validation_owed(load(tmp_path / "resumed" / "checkpoints" / "last.ckpt")) is False


def test_the_outcome_of_a_run_that_goes_on_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path)
    run(tiny_config(corpus), tmp_path / "run")
    longer = ["resume=last", "trainer.max_steps=100000"]
    add_callback(monkeypatch, SignalAfterStep(7))
    with pytest.raises(GracefulStop):
        run(tiny_config(corpus, *longer), tmp_path / "run", longer)
    assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 7
    for name in ("results.json", "curve.png"):
        assert not (tmp_path / "run" / name).exists()
        assert (tmp_path / "run" / "resumed" / "step-6" / name).exists()
    assert read_results(tmp_path / "run" / "resumed" / "step-6")["global_step"] == 6


@pytest.mark.parametrize("stale", [False, True], ids=["without-results", "with-those-of-another-step"])
def test_a_run_that_ended_before_its_results_were_written_is_completed(tmp_path: Path, stale: bool) -> None:
    """All was trained, validated and saved, and then the process was killed."""
    corpus = write_corpus(tmp_path)
    straight = run(tiny_config(corpus), tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before, rows = load(last), logged(tmp_path / "run")
    (tmp_path / "run" / "curve.png").unlink()
    (tmp_path / "run" / "results.json").unlink()
    if stale:
        write_json(tmp_path / "run" / "results.json", {**straight, "global_step": 3, "val/loss": 9.0})
    results = run(tiny_config(corpus, "resume=last"), tmp_path / "run")
    assert results == {name: value for name, value in straight.items() if name != "train/loss"}
    assert read_results(tmp_path / "run") == results
    assert (tmp_path / "run" / "curve.png").exists()
    assert logged(tmp_path / "run") == rows
    assert differences(load(last), before) == []


def test_best_checkpoint_resumes_after_its_validation(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, documents=5)
    straight = train_tiny(tiny_config(corpus), tmp_path / "straight")
    best = tmp_path / "straight" / "checkpoints" / "best.ckpt"
    step = load(best)["global_step"]
    seen: list[Any] = []
    settings = [f"resume={best}", "trainer.max_steps=8", "schedule.total_steps=8"]
    train_tiny(tiny_config(corpus, *settings), tmp_path / "longer", Draws(seen), overrides=settings)
    assert seen[0][1] != "validation"
    assert load(tmp_path / "longer" / "checkpoints" / "last.ckpt")["global_step"] == 8
    assert step in (4, straight.trainer.max_steps)


def test_a_new_folder_has_its_own_best_checkpoint(tmp_path: Path) -> None:
    """Although nothing gets better there: from step 6 on nothing is learnt."""
    corpus = write_corpus(tmp_path, documents=5)
    train_tiny(tiny_config(corpus), tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    changed = [f"resume={last}", "trainer.max_steps=8", "optimizer.lr=1e-12"]
    elsewhere = run(tiny_config(corpus, *changed), tmp_path / "new", changed)
    best = load(tmp_path / "new" / "checkpoints" / "best.ckpt")
    assert best["global_step"] == elsewhere["best/step"] == 8
    assert elsewhere["best/val/loss"] == elsewhere["val/loss"]


def test_batch_size_may_change(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, documents=5)
    epochs = ["trainer.max_steps=-1", "trainer.max_epochs=2"]
    seen: list[Any] = []
    with pytest.raises(GracefulStop):
        train_tiny(tiny_config(corpus, *epochs), tmp_path / "run", Draws(seen), SignalAfterStep(5))
    changed = [*epochs, "data.batch_size=3", "resume=last"]
    later: list[Any] = []
    done = train_tiny(tiny_config(corpus, *changed), tmp_path / "run", Draws(later), overrides=changed)
    rows = [row for item in [*seen[:], *later] if item[1] != "validation" for row in item[2]]
    data = done.plan.data
    assert data.rows_consumed == 2 * data.rows_per_epoch
    straight: list[Any] = []
    train_tiny(tiny_config(corpus, *epochs), tmp_path / "straight", Draws(straight))
    wanted = [row for item in straight if item[1] != "validation" for row in item[2]]
    pad = data.tokenizer.pad_id
    empty = [pad] * data.seq_len
    assert [r for r in rows if r != empty] == [r for r in wanted if r != empty]
    assert done.trainer.current_epoch == 2


def test_a_changed_learning_rate_holds_from_the_first_resumed_step(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, documents=5)
    train_tiny(tiny_config(corpus, "schedule.total_steps=9", "optimizer.lr=1e-3"), tmp_path / "run")
    changed = ["optimizer.lr=5e-4", "optimizer.weight_decay=0.5", "trainer.max_steps=8", "resume=last"]
    done = train_tiny(tiny_config(corpus, *changed), tmp_path / "run", overrides=changed)
    rates = [float(row["lr"]) for row in read_rows(tmp_path / "run" / "logs" / "metrics.csv") if row["lr"]]
    schedule = done.plan.schedule
    assert schedule.total_steps == 9  # the checkpoint's
    expected = [(1e-3 if step < 6 else 5e-4) * schedule.factor(step, 9) for step in range(8)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert [group["weight_decay"] for group in done.trainer.optimizers[0].param_groups] == [0.5, 0.0]


class TestErrors:
    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^resume=.*missing\.ckpt: no such file"):
            run(tiny_config(write_corpus(tmp_path), "resume=missing.ckpt"), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_last_without_any(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^resume=last: no checkpoint in .*run/checkpoints; set hydra\.run\.dir"):
            run(tiny_config(write_corpus(tmp_path), "resume=last"), tmp_path / "run")

    def test_truncated_file_leaves_the_run_as_it_was(self, tmp_path: Path) -> None:
        corpus = write_corpus(tmp_path)
        train_tiny(tiny_config(corpus), tmp_path / "run")
        last = tmp_path / "run" / "checkpoints" / "last.ckpt"
        whole = last.read_bytes()
        last.write_bytes(whole[: len(whole) // 2])
        before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
        with pytest.raises(ConfigError, match=r"last\.ckpt: is truncated"):
            run(tiny_config(corpus, "resume=last"), tmp_path / "run")
        assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}

    def test_foreign_file(self, tmp_path: Path) -> None:
        torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
        with pytest.raises(ConfigError, match=r"other\.ckpt: is not a checkpoint that train\.py wrote"):
            find_checkpoint(str(tmp_path / "other.ckpt"), tmp_path)

    def test_last_is_the_highest_step(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        own = {"format": 1, "config": {}, "tokenizer": {}}
        for name, step in (("a", 9), ("b", 100), ("c", 20)):
            torch.save({"samu_lm": own, "global_step": step, "loops": {}}, folder / f"{name}.ckpt")
        path, content = find_checkpoint("last", tmp_path)
        assert (path.name, content["global_step"]) == ("b.ckpt", 100)

    def test_another_model_is_refused_with_both_values(self, tmp_path: Path) -> None:
        corpus = write_corpus(tmp_path)
        train_tiny(tiny_config(corpus), tmp_path / "run")
        last = tmp_path / "run" / "checkpoints" / "last.ckpt"
        with pytest.raises(ConfigError, match=r"^model\.mixer=rglru: the checkpoint has model\.mixer=samu"):
            run(tiny_config(corpus, "model=rglru_tiny", f"resume={last}"), tmp_path / "other")
        assert not (tmp_path / "other").exists()

    def test_a_run_is_not_started_over_another(self, tmp_path: Path) -> None:
        corpus = write_corpus(tmp_path)
        train_tiny(tiny_config(corpus), tmp_path / "run")
        with pytest.raises(ConfigError, match=r"^hydra\.run\.dir=.*: holds a run's last\.ckpt; add resume=last"):
            run(tiny_config(corpus), tmp_path / "run")

    @pytest.mark.parametrize("by", ["steps", "epochs"])
    def test_a_finished_run_has_nothing_to_do(self, tmp_path: Path, by: str) -> None:
        corpus = write_corpus(tmp_path)
        length = ["trainer.max_steps=-1", "trainer.max_epochs=2"] if by == "epochs" else []
        results = run(tiny_config(corpus, *length), tmp_path / "run")
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
        assert run(tiny_config(corpus, *length, "resume=last"), tmp_path / "run") == results
        assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


class TestMergedConfig:
    saved: Mapping[str, Any] = {
        "model": {"_target_": "m", "width": 8, "backend": "auto"},
        "data": {"_target_": "d", "seq_len": 16, "batch_size": 2},
        "optimizer": {"_target_": "o", "lr": 0.1},
        "trainer": {"max_steps": 10},
        "seed": 3,
        "resume": None,
    }
    composed: Mapping[str, Any] = {
        "model": {"_target_": "m", "width": 64, "backend": "triton"},
        "data": {"_target_": "d", "seq_len": 512, "batch_size": 8},
        "optimizer": {"_target_": "o", "lr": 0.5},
        "trainer": {"max_steps": 20},
        "seed": 0,
        "resume": "last",
        "compile": True,
    }

    def merged(self, *overrides: str) -> dict[str, Any]:
        return merge_config(self.composed, self.saved, ["resume=last", *overrides])

    def test_the_checkpoint_s_config_holds_where_nothing_is_set(self) -> None:
        assert self.merged() == {**self.saved, "resume": "last", "compile": True}

    def test_what_may_change_is_taken(self) -> None:
        merged = self.merged("trainer.max_steps=20", "optimizer=o", "data.batch_size=8", "model.backend=triton")
        assert merged["trainer"] == {"max_steps": 20}
        assert merged["optimizer"] == self.composed["optimizer"]
        assert merged["data"] == {"_target_": "d", "seq_len": 16, "batch_size": 8}
        assert merged["model"] == {"_target_": "m", "width": 8, "backend": "triton"}

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("model.width=64", r"^model\.width=64: the checkpoint has model\.width=8;"),
            ("model=other", r"^model\.width=64: the checkpoint has model\.width=8;"),
            ("data.seq_len=512", r"^data\.seq_len=512: the checkpoint has data\.seq_len=16;"),
            ("seed=0", r"^seed=0: the checkpoint has seed=3;"),
        ],
    )
    def test_contradictions_name_both_values(self, override: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.merged(override)

    def test_an_override_repeated_from_the_first_command_passes(self) -> None:
        same = {**self.composed, "model": self.saved["model"]}
        assert merge_config(same, self.saved, ["model.width=8"])["model"] == self.saved["model"]

    def test_a_checkpoint_from_before_the_stream_s_key_goes_on_with_a_float32_stream(self) -> None:
        model = {"_target_": "samu_lm.model.RecurrentLM", "width": 8}
        saved, composed = (
            {**self.saved, "model": model},
            {**self.composed, "model": {**model, "residual_in_float32": False}},
        )
        for repeated in ([], ["model=same"], ["model.width=8"]):
            assert merge_config(composed, saved, repeated)["model"]["residual_in_float32"] is True
        with pytest.raises(ConfigError, match=r"^model\.residual_in_float32=False: the checkpoint has .*=True;"):
            merge_config(composed, saved, ["model.residual_in_float32=false"])
        saved = {**saved, "model": {**model, "residual_in_float32": False}}
        assert merge_config(composed, saved, [])["model"]["residual_in_float32"] is False

    def test_what_the_command_line_deletes_is_deleted(self) -> None:
        saved = {**self.saved, "callbacks": {"mfu": {"_target_": "c"}, "last": {"_target_": "l"}}}
        composed = {**self.composed, "callbacks": {"last": {"_target_": "l"}}}
        merged = merge_config(composed, saved, ["~callbacks.mfu", "resume=last"])
        assert merged["callbacks"] == {"last": {"_target_": "l"}}

    def test_an_experiment_sets_its_own_keys_only(self) -> None:
        composed = {**self.composed, "model": {"_target_": "m", "width": 8, "rnn_width": 32, "depth": 2}}
        saved = {**self.saved, "model": {"_target_": "m", "width": 8, "rnn_width": 32, "depth": 2, "mixer": "rglru"}}
        data = {"_target_": "d", "max_bytes": 1, "seq_len": 16, "batch_size": 4}
        merged = merge_config({**composed, "data": data}, {**saved, "data": data}, ["experiment=smoke"])
        assert merged["model"]["mixer"] == "rglru"
