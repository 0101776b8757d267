"""Whole runs in processes of their own: killed at random moments, and to the recorded losses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samu_lm.environment import environment
from samu_lm.training.loggers import read_rows
from samu_lm.training.record import write_json
from tests.training.support import differences, load, tiny_overrides, write_corpus
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
        write_json(Path(record) / "results.json", steps)
        command = ["python", "-m", "pytest", "tests/training/test_processes.py", "-k", "killed"]
        write_json(Path(record) / "environment.json", environment() | {"command": command})


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
