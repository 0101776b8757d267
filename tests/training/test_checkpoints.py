"""The files of a run's checkpoints folder: how many are kept, which is taken, and what never becomes one."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from samu_lm.checkpoint import read_checkpoint
from samu_lm.errors import ConfigError
from samu_lm.training.callbacks import NonFiniteError
from samu_lm.training.checkpoint_io import keep_as
from samu_lm.training.loggers import read_rows
from samu_lm.training.resume import find_checkpoint, find_last
from samu_lm.training.run import run
from tests.training.support import differences, load, tiny_config, train_tiny, write_corpus

KEEP_3 = ["callbacks.last.every_n_steps=1", "callbacks.last.keep=3", "trainer.val_check_interval=50"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The corpus and the folder of a run that kept three checkpoints."""
    folder = tmp_path_factory.mktemp("kept")
    corpus = write_corpus(folder)
    train_tiny(tiny_config(corpus, *KEEP_3, "~callbacks.best"), folder / "run")
    return corpus, folder / "run"


def test_the_last_three_are_kept_and_the_newest_takes_no_room_of_its_own(kept: tuple[Path, Path]) -> None:
    folder = kept[1] / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["last.ckpt", "step-4.ckpt", "step-5.ckpt", "step-6.ckpt"]
    assert [load(folder / f"step-{n}.ckpt")["global_step"] for n in (4, 5, 6)] == [4, 5, 6]
    assert os.path.samefile(folder / "last.ckpt", folder / "step-6.ckpt")
    assert find_last(folder) == folder / "last.ckpt"


def test_one_is_the_default(tmp_path: Path) -> None:
    settings = ["callbacks.last.every_n_steps=1", "~callbacks.best"]
    train_tiny(tiny_config(write_corpus(tmp_path), *settings), tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.ckpt"]
    with pytest.raises(ConfigError, match=r"^callbacks\.last\.keep=0: must be at least 1"):
        run(tiny_config(write_corpus(tmp_path), "callbacks.last.keep=0"), tmp_path / "other")


def test_an_older_one_goes_on_in_a_new_folder_only(kept: tuple[Path, Path], tmp_path: Path) -> None:
    """In its own folder the run's later checkpoints would be taken for those of the part that goes on."""
    corpus, folder = kept
    older = f"resume={folder}/checkpoints/step-4.ckpt"
    with pytest.raises(
        ConfigError, match=r"^resume=.*step-4\.ckpt: .*last\.ckpt has gone on to step 6; choose another"
    ):
        run(tiny_config(corpus, *KEEP_3, older), folder)
    done = train_tiny(tiny_config(corpus, *KEEP_3, older), tmp_path / "again")
    again = load(tmp_path / "again" / "checkpoints" / "last.ckpt")
    assert done.trainer.global_step == 6
    assert differences(again["state_dict"], load(folder / "checkpoints" / "last.ckpt")["state_dict"]) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_keeps_the_content(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: Any) -> None:
        raise OSError("this file system has no hard links")

    if not links:
        monkeypatch.setattr(os, "link", none)
    first, second = tmp_path / "last.ckpt", tmp_path / "step-1.ckpt"
    first.write_bytes(b"one")
    for _ in range(2):  # the second time both names are the same file already
        keep_as(first, second)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step-1.ckpt"]
    (tmp_path / "new").write_bytes(b"two")
    os.replace(tmp_path / "new", first)
    assert second.read_bytes() == b"one"


def test_no_changed_byte_is_read_as_if_it_were_whole(kept: tuple[Path, Path], tmp_path: Path) -> None:
    """A byte changed anywhere is refused, unless it is one of the padding between the parts."""
    whole = (kept[1] / "checkpoints" / "last.ckpt").read_bytes()
    content = read_checkpoint(kept[1] / "checkpoints" / "last.ckpt", "resume")
    chance = random.Random(0)
    refused = 0
    for _ in range(40):
        place = chance.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path = tmp_path / "damaged.ckpt"
        path.write_bytes(damaged)
        try:
            read = read_checkpoint(path, "resume")
        except ConfigError as error:
            refused += str(error).startswith(f"resume={path}: ")
        else:
            assert differences(read, content) == [], place
    assert refused >= 20


def test_every_damage_is_one_error_of_the_user(tmp_path: Path) -> None:
    """Any bit of a small checkpoint, its directory's fields included."""
    whole, path = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    own = {"format": 1, "config": {}, "tokenizer": {"kind": "bytes"}}
    torch.save({"state_dict": {"a": torch.arange(3.0)}, "samu_lm": own, "global_step": 1}, whole)
    content = whole.read_bytes()
    for place in range(0, len(content), 2):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place // 2 % 8
        path.write_bytes(damaged)
        try:
            read = read_checkpoint(path, "resume")
        except ConfigError:
            continue
        assert torch.equal(read["state_dict"]["a"], torch.arange(3.0)), place


def test_the_newest_being_damaged_is_an_error_and_the_one_before_goes_on(
    kept: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("step-5.ckpt", "last.ckpt"):
        (folder / name).write_bytes((kept[1] / "checkpoints" / name).read_bytes())
    damaged = bytearray((folder / "last.ckpt").read_bytes())
    start = damaged.index(load(folder / "last.ckpt")["state_dict"]["model.embedding.weight"].numpy().tobytes()[:64])
    damaged[start] ^= 1
    (folder / "last.ckpt").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"last\.ckpt: is damaged in .*; copy it again or give an earlier one"):
        find_checkpoint("last", tmp_path / "run")
    (folder / "last.ckpt").unlink()
    assert find_checkpoint("last", tmp_path / "run")[1]["global_step"] == 5


class SpoilWeight(Callback):
    """Sets a weight to NaN when a step is finished."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            with torch.no_grad():
                module.model.final_norm.scale[2] = float("nan")


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    cfg = tiny_config(write_corpus(tmp_path), *KEEP_3)
    with pytest.raises(NonFiniteError, match=r"^step 3: model\.final_norm\.scale holds NaN or infinity; .*last\.ckpt"):
        train_tiny(cfg, tmp_path / "run", SpoilWeight())
    assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 2


@pytest.mark.parametrize("value", ["", "'  '"])
def test_an_empty_resume_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"^resume= *: must be last, auto, a checkpoint's path, or null"):
        run(tiny_config(write_corpus(tmp_path), f"resume={value}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    settings = ["schedule.total_steps=9", "resume=auto"]
    assert train_tiny(tiny_config(corpus, *settings), tmp_path / "run").plan.step == 0
    done = train_tiny(tiny_config(corpus, *settings, "trainer.max_steps=9"), tmp_path / "run")
    assert (done.plan.step, done.trainer.global_step) == (6, 9)


def test_the_log_of_a_run_that_left_no_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    """Killed in its first steps, the run begins anew in the same folder: each step is one row."""
    settings = ["callbacks.last.every_n_steps=0", "trainer.val_check_interval=50", "resume=auto"]
    corpus = write_corpus(tmp_path)

    class End(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                raise MemoryError

    with pytest.raises(MemoryError):
        train_tiny(tiny_config(corpus, *settings), tmp_path / "run", End())
    train_tiny(tiny_config(corpus, *settings), tmp_path / "run")
    logs = tmp_path / "run" / "logs"
    rows = [row for row in read_rows(logs / "metrics.csv") if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in read_rows(logs / "metrics.interrupted.csv")] == [1, 2]
