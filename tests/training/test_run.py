"""A run from a composed config: what it leaves behind, and what it refuses before it reads data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from samu_lm.config import config_dir
from samu_lm.data import LMDataModule
from samu_lm.errors import ConfigError
from samu_lm.training.run import run
from tests.training.support import differences, load, tiny_config, train_tiny, write_corpus


def test_a_run_s_folder(tmp_path: Path) -> None:
    cfg = tiny_config(write_corpus(tmp_path))
    results = run(cfg, tmp_path / "run", ["trainer.max_steps=6"])
    files = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert files == {
        "config.yaml",
        "overrides.yaml",
        "environment.json",
        "results.json",
        "curve.png",
        "logs/metrics.csv",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
    }
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written == results
    assert written["status"] == "completed"
    assert written["global_step"] == 6
    assert {"train/loss", "val/loss", "val/bits_per_byte", "targets_seen"} <= written.keys()
    assert 0 < written["val/loss"] < 10


def test_a_saved_config_reruns_the_job(tmp_path: Path) -> None:
    cfg = tiny_config(write_corpus(tmp_path))
    first = run(cfg, tmp_path / "first")
    with initialize_config_dir(str(tmp_path / "first"), version_base="1.3"):
        again = compose("config")
    assert run(again, tmp_path / "second") == first
    checkpoints = [load(tmp_path / which / "checkpoints" / "last.ckpt") for which in ("first", "second")]
    assert differences(*checkpoints) == []


def test_a_resumed_run_leaves_the_first_record_alone(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    run(tiny_config(corpus, "schedule.total_steps=9"), tmp_path / "run", ["a=1"])
    longer = ["schedule.total_steps=9", "trainer.max_steps=9", "resume=last"]
    run(tiny_config(corpus, *longer), tmp_path / "run", longer)
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").trainer.max_steps == 6
    assert OmegaConf.load(tmp_path / "run" / "overrides.yaml") == ["a=1"]
    resumed = tmp_path / "run" / "resumed" / "step-6"
    assert OmegaConf.load(resumed / "config.yaml").trainer.max_steps == 9
    assert OmegaConf.load(resumed / "overrides.yaml") == longer
    assert json.loads((tmp_path / "run" / "results.json").read_text())["global_step"] == 9


def test_one_seed_one_run(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    losses = [run(tiny_config(corpus, f"seed={s}"), tmp_path / str(i))["val/loss"] for i, s in enumerate((3, 3, 4))]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_without_a_logger_there_is_no_curve(tmp_path: Path) -> None:
    run(tiny_config(write_corpus(tmp_path), "logger=none"), tmp_path / "run")
    assert not (tmp_path / "run" / "curve.png").exists()
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_other_loggers_write_into_the_run_s_folder(
    tmp_path: Path, logger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    run(tiny_config(write_corpus(tmp_path), f"logger={logger}"), tmp_path / "run")
    pattern = {"tensorboard": "events.out.*", "wandb": "wandb/offline-run-*/*.wandb"}[logger]
    assert list((tmp_path / "run" / "logs").glob(pattern))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.txt", "run"]


@pytest.mark.parametrize("first", [False, True])
def test_compiled_and_uncompiled_parts_of_a_run_go_together(
    tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint does not say whether the run was compiled: each kind goes on from the other's."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, backend: compiled(function, backend="aot_eager"))
    corpus = write_corpus(tmp_path)
    settings = ["schedule.total_steps=4", "trainer.val_check_interval=2"]
    parts = [
        train_tiny(tiny_config(corpus, *settings, f"compile={first}", "trainer.max_steps=2"), tmp_path / "run"),
        train_tiny(
            tiny_config(corpus, *settings, f"compile={not first}", "trainer.max_steps=4", "resume=last"),
            tmp_path / "run",
        ),
    ]
    plain = train_tiny(tiny_config(corpus, *settings, "trainer.max_steps=4"), tmp_path / "plain")
    names = load(tmp_path / "run" / "checkpoints" / "last.ckpt")["state_dict"].keys()
    assert names == {f"model.{name}" for name in plain.module.model.state_dict()}
    assert parts[1].results["val/loss"] == pytest.approx(plain.results["val/loss"], rel=1e-4)


def test_bfloat16_trains(tmp_path: Path) -> None:
    done = train_tiny(tiny_config(write_corpus(tmp_path), "trainer.precision=bf16-mixed"), tmp_path / "run")
    assert done.results["train/loss"] < 10
    assert all(p.dtype == torch.float32 for p in done.module.parameters())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+model.widht=5"], r"^model\.widht=5: unknown key; did you mean width"),
        (["model.width=${nope}"], r"^model\.width=\$\{nope\}: refers to a config value that does not exist"),
        (["model.width=wide"], r"^model\.width=wide: wrong type str"),
        (["model.rnn_width=63"], r"^model\.rnn_width=63: SAMU needs an even width"),
        (["model=rglru_tiny", "model.rnn_width=100"], r"^model\.rnn_width=100: must be divisible by num_blocks=16"),
        (["model.vocab_size=100"], r"^model\.vocab_size=100: must be at least the tokenizer's 258, or null"),
        (["optimizer.lr=-1"], r"^optimizer\.lr=-1: must be a positive number"),
        (["schedule.warmup_steps=6"], r"^schedule\.warmup_steps=6: must be below trainer\.max_steps=6"),
        (["data.seq_len=1"], r"^data\.seq_len=1: give a whole number, 2 or more"),
        (["data.path=missing"], r"^data\.path=.*missing"),
        (["trainer.accelerator=gpu"], r"^trainer\.accelerator=gpu: there is no GPU here; use trainer=cpu"),
        (["trainer.val_check_interval=0"], r"^trainer\.val_check_interval=0: must be a count of batches"),
        (["trainer.limit_val_batches=1.5"], r"^trainer\.limit_val_batches=1\.5: must be a count of batches"),
        (["trainer.log_every_n_steps=0"], r"^trainer\.log_every_n_steps=0: must be at least 1"),
        (["trainer.max_epochs=0"], r"^trainer\.max_epochs=0: must be at least 1"),
        (["trainer.max_steps=-1"], r"^trainer\.max_steps=-1: a run needs an end"),
        (["model.width=99999999999999"], r"^model=\(width=99999999999999.*cannot be built"),
        (["trainer.accelerator=abacus"], r"^trainer\.accelerator=abacus: Lightning refuses it"),
        (["trainer.accelerator=tpu"], r"^trainer=\(accelerator=tpu, strategy=auto\): needs a package: .*torch_xla"),
        (["compile=${trainer.max_steps}"], r"^compile=6: must be true, false or auto"),
        (["fp8=${trainer.precision}"], r"^fp8=auto: must be one of none, tensorwise, rowwise"),
        (["~compile"], r"^compile=None: must be true, false or auto"),
        (["trainer.gradient_clip_val=-1"], r"^trainer\.gradient_clip_val=-1: must be positive, or null"),
        (["trainer.accumulate_grad_batches=0"], r"^trainer\.accumulate_grad_batches=0: must be at least 1"),
        (
            ["trainer.precision=16-mixed"],
            r"^trainer\.precision=16-mixed: must be one of auto, 32-true, bf16-mixed, bf16-true",
        ),
        (
            ["trainer.precision=${nope}"],
            r"^trainer\.precision=\$\{nope\}: refers to a config value that does not exist",
        ),
        (["trainer.precision=fp16"], r"^trainer\.precision=fp16: must be one of auto, 32-true, bf16-mixed, bf16-true"),
        (["trainer.max_steps=0"], r"^trainer\.max_steps=0: must be at least 1"),
        (["compile=yes"], r"^compile=yes: must be true, false or auto"),
        (["seed=-1"], r"^seed=-1: must be a whole number"),
        (["seed=1.5"], r"^seed=1\.5: must be a whole number"),
        (["resume=3"], r"^resume=3: must be last, auto, a checkpoint's path, or null"),
        (["resume=nowhere.ckpt"], r"^resume=.*nowhere\.ckpt: no such file"),
        (["logger.csv.folder=3"], r"^logger\.csv\.folder=3: wrong type int"),
    ],
)
def test_refused_before_data_is_read_or_anything_is_written(
    tmp_path: Path, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(self: Any, stage: str | None = None) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(LMDataModule, "setup", setup)
    cfg = tiny_config(write_corpus(tmp_path), *overrides)
    with pytest.raises(ConfigError, match=message) as error:
        run(cfg, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_shards_that_are_missing_are_named_by_the_key_that_the_user_sets(tmp_path: Path) -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("train", ["data=shards", "trainer=cpu"])
    with pytest.raises(ConfigError, match=r"^data\.path=None: give a folder that samu-lm prepare wrote"):
        run(cfg, tmp_path / "run")


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^hydra\.run\.dir=.*file/run: cannot be written"):
        run(tiny_config(write_corpus(tmp_path)), tmp_path / "file" / "run")


def test_the_smoke_experiment_is_small() -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("train", ["experiment=smoke"])
    assert cfg.trainer.max_steps == 20
    assert cfg.trainer.accelerator == "cpu"
    assert cfg.data.seq_len * cfg.data.batch_size <= 1024
