"""Whole runs in processes of their own: killed at random moments, and to the recorded losses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.checkpoint import read_checkpoint, read_step
from samu_lm.environment import environment
from samu_lm.errors import ConfigError
from samu_lm.training.loggers import read_rows
from samu_lm.training.record import write_json
from tests.training.support import differences, load, tiny_config, tiny_overrides, train_tiny, write_corpus
from tests.training.test_resume import logged
from tests.training.warm import Warm

KILLS = 20
STEPS = 40
PLACES = {"t": "step", "v": "validation", "s": "save", "": "start"}
GOLDEN = Path(__file__).with_name("golden_losses.json")


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()


@pytest.mark.slow
def test_killed_20_times_at_random_moments_the_run_ends_with_the_same_bits(warm: Warm, tmp_path: Path) -> None:
    """Moments are events (in steps, in validations, between the writes of a save) drawn with a fixed seed, some with a
    delay after the event, some counted from the start of the process; each resumed run gets the same command."""
    settings = [
        *tiny_overrides(write_corpus(tmp_path, documents=5)), f"trainer.max_steps={STEPS}", "resume=auto",
        "trainer.val_check_interval=3", "callbacks.last.every_n_steps=2", "callbacks.last.keep=2", "data.seq_len=64",
    ]  # fmt: skip
    output = tmp_path / "output"

    def train(name: str, **kill: Any) -> int:
        command = [*settings, f"hydra.run.dir={tmp_path / name}"]
        (status,) = warm.train(command, output, {"events": str(tmp_path / "events"), **kill})
        return status

    def compare(name: str) -> None:
        """Everything that the killed run left behind equals what the straight run left, but for the seconds."""
        folders = [tmp_path / which / "checkpoints" for which in ("straight", name)]
        for file in ("last.ckpt", "best.ckpt"):
            assert differences(*(load(folder / file) for folder in folders)) == [], file
        names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        assert names[0] == names[1] == ["best.ckpt", "last.ckpt", f"step-{STEPS - 2}.ckpt", f"step-{STEPS}.ckpt"]
        assert logged(tmp_path / name) == logged(tmp_path / "straight")

    assert train("straight") == 0, output.read_text()
    counted = Counter((tmp_path / "events").read_text())
    chance = random.Random(0)
    kills: list[dict[str, Any]] = []
    folder = 0
    while len(kills) < KILLS:
        (tmp_path / "events").write_text("")
        letter = "tvs"[len(kills) % 3] if len(kills) % 5 else ""
        number = chance.randint(1, 3 * counted[letter] // STEPS) if letter else 1
        delay = chance.choice([0.0, chance.uniform(0.001, 0.02)]) if letter else chance.uniform(0.0, 1.0)
        status = train(f"killed-{folder}", letter=letter, number=number, delay=delay)
        assert status in (-9, 0), f"{len(kills)} kills: {output.read_text()[-4000:]}"
        if status == 0:  # this run was completed before its moment: the rest of the kills are another's
            compare(f"killed-{folder}")
            folder += 1
            continue
        last = (tmp_path / "events").read_text()[-1:]
        kills.append({"at": PLACES[letter], "number": number, "delay": delay, "last_event": PLACES[last]})
    assert {"step", "validation", "save"} <= {kill["last_event"] for kill in kills}, kills
    assert train(f"killed-{folder}") == 0, output.read_text()[-4000:]
    compare(f"killed-{folder}")
    if record := os.environ.get("SAMU_LM_RECORD"):
        steps = {"steps": STEPS, "runs": folder + 1, "kills": kills, "bits_that_differ": 0}
        Path(record).mkdir(parents=True, exist_ok=True)
        write_json(Path(record) / "results.json", steps)
        command = ["python", "-m", "pytest", "tests/training/test_processes.py", "-k", "killed"]
        write_json(Path(record) / "environment.json", environment() | {"command": command})


SHARDED = ["trainer=sharded", "trainer.accelerator=cpu", "trainer.precision=32-true"]


@pytest.mark.slow
def test_checkpoints_of_several_ranks_go_on_with_another_number_and_strategy(warm: Warm, tmp_path: Path) -> None:
    """Two ranks in shards, stopped by a signal to one of them, then one rank in shards and one with whole tensors; two
    ranks of DDP, then two in shards. All equal, but for rounding, one process with the same rows a step."""
    corpus = write_corpus(tmp_path)
    output = tmp_path / "output"
    tiny = [a for a in tiny_overrides(corpus) if a != "trainer=cpu"]
    tiny += ["trainer.val_check_interval=3", "schedule.total_steps=6"]

    def train(name: str, ranks: int, *settings: str, **more: Any) -> list[int]:
        command = [*tiny, f"trainer.devices={ranks}", f"hydra.run.dir={tmp_path / name}", *settings]
        return warm.train(command, output, ranks=ranks, **more)

    def last(name: str) -> Path:
        return tmp_path / name / "checkpoints" / "last.ckpt"

    signal_in_step_4 = {"events": str(tmp_path / "events"), "letter": "t", "number": 13, "signum": signal.SIGTERM}
    kept = ["callbacks.last.every_n_steps=2", "callbacks.last.keep=2", "trainer.max_steps=100000"]
    assert train("two", 2, *SHARDED, *kept, kill=signal_in_step_4) == [143, 143], output.read_text()[-4000:]
    folder = last("two").parent
    assert {p.name for p in folder.glob("[!.]*")} == {"last.ckpt", "best.ckpt", "step-2.ckpt", "step-4.ckpt"}
    assert len(list(folder.glob(".*"))) == 3  # nothing is left of the folders that had these names before
    assert read_step(last("two"), "resume") == 4
    on = [f"resume={last('two')}", "data.batch_size=4", "trainer.max_steps=6"]
    assert train("one", 1, *SHARDED, *on) == [0], output.read_text()[-4000:]
    assert train("ddp", 2, "trainer=cpu", "trainer.strategy=ddp", "trainer.max_steps=4") == [0, 0]
    on_in_shards = [f"resume={last('ddp')}", *SHARDED, "trainer.max_steps=6"]
    assert train("ddp-two", 2, *on_in_shards) == [0, 0], output.read_text()[-4000:]
    whole = ["trainer.val_check_interval=3", "trainer.strategy=auto", "trainer.devices=1", *on]
    train_tiny(tiny_config(corpus, *whole), tmp_path / "whole", overrides=whole)
    same_rows = ["trainer.val_check_interval=3", "schedule.total_steps=6", "data.batch_size=4"]
    train_tiny(tiny_config(corpus, *same_rows), tmp_path / "straight")
    expected = read_checkpoint(last("straight"), "resume")
    for name in ("one", "ddp-two", "whole"):
        found = read_checkpoint(last(name), "resume")
        assert found["global_step"] == 6
        assert found["samu_lm"]["targets_seen"] == expected["samu_lm"]["targets_seen"], name
        for weight, value in expected["state_dict"].items():
            torch.testing.assert_close(
                found["state_dict"][weight], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {weight}"
            )
        states, own = found["optimizer_states"][0], expected["optimizer_states"][0]
        assert [g["params"] for g in states["param_groups"]] == [g["params"] for g in own["param_groups"]]
        for number, state in own["state"].items():
            for moment in ("step", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(states["state"][number][moment], state[moment], rtol=1e-3, atol=1e-8)
    _damage_is_refused(tmp_path, last("two"))


def _damage_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    shards = tmp_path / "copy.ckpt"
    shutil.copytree(checkpoint, shards)
    piece = next(shards.glob("*.distcp"))
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 1
    piece.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"copy\.ckpt: is damaged in {piece.name}; copy it again"):
        read_checkpoint(shards, "resume")
    piece.unlink()
    with pytest.raises(ConfigError, match=rf"copy\.ckpt: is incomplete: it lacks {piece.name}; copy it again"):
        read_checkpoint(shards, "resume")


def test_one_rank_that_cannot_write_ends_all(warm: Warm, tmp_path: Path) -> None:
    """The first rank fails to make the folder; the other must not wait for it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    tiny = [a for a in tiny_overrides(write_corpus(tmp_path)) if a != "trainer=cpu"]
    command = [*tiny, *SHARDED, "trainer.devices=2", "trainer.max_steps=3", f"hydra.run.dir={tmp_path}/run"]
    assert warm.train(command, tmp_path / "output", ranks=2) == [4, 4]
    assert "checkpoint=" in (tmp_path / "output").read_text()
    assert "rank 0 cannot write it (" in (tmp_path / "output").read_text()


@pytest.mark.parametrize("model", ["samu_tiny", "rglru_tiny"])
def test_losses_are_the_recorded_ones(warm: Warm, tmp_path: Path, model: str) -> None:
    """Bit for bit with the recorded version of PyTorch, to rounding with another.

    After a change that is meant to change them: SAMU_LM_RECORD=1 pytest tests/training/test_processes.py -k recorded
    """
    arguments = [f"model={model}", *tiny_overrides(write_corpus(tmp_path)), "trainer.max_steps=20"]
    (status,) = warm.train([*arguments, f"hydra.run.dir={tmp_path}/run"], tmp_path / "output")
    assert status == 0, (tmp_path / "output").read_text()
    rows = read_rows(tmp_path / "run" / "logs" / "metrics.csv")
    found = {name: [float(row[name]) for row in rows if row[name]] for name in ("train/loss", "val/loss", "grad_norm")}
    version = importlib.metadata.version("torch").partition("+")[0]
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("SAMU_LM_RECORD"):
        GOLDEN.write_text(json.dumps(golden | {"torch": version, model: found}, indent=1) + "\n")
    elif golden["torch"] == version:
        assert found == golden[model]
    else:
        for name, values in golden[model].items():
            assert found[name] == pytest.approx(values, rel=1e-5), name
    assert len(found["train/loss"]) == 20
    assert found["train/loss"][-1] < found["train/loss"][0] - 0.5
