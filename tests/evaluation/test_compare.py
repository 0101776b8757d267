"""``samu-lm compare``: what it reads from runs' folders, and the report it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from samu_lm.cli import main
from samu_lm.evaluation.compare import targets_at
from samu_lm.evaluation.runs import differences, find_runs

TINY = Path(__file__).parents[2] / "benchmarks" / "results" / "tiny"


def make_run(folder: Path, rows: list[dict[str, Any]], *, lr: float = 0.1, **files: Any) -> Path:
    (folder / "logs").mkdir(parents=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    (folder / "logs" / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump({"optimizer": {"lr": lr}, "seed": 1, "hydra": {"job": lr}}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ROWS = [
    {"step": 10, "targets_seen": 100.0, "train/loss": 3.0, "tokens_per_second": 5.0},
    {"step": 20, "targets_seen": 200.0, "train/loss": 2.0, "tokens_per_second": 50.0},
    {"step": 25, "val/loss": 2.5},
    {"step": 30, "targets_seen": 300.0, "train/loss": 1.5, "tokens_per_second": 70.0, "mfu": 0.41},
]


def test_report_holds_everything_and_refers_to_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_run(tmp_path / "a" / "run", ROWS, results={"status": "completed", "parameters": 1234})
    second = make_run(tmp_path / "b" / "run", ROWS[:2], lr=0.2, environment={"git_commit": "abc<def", "command": ["x"]})
    (first / "resumed" / "step-20").mkdir(parents=True)
    output = tmp_path / "out" / "report.html"
    assert main(["compare", str(first), str(second), "--output", str(output), "--title", "A & B"]) == 0
    text = output.read_text()
    assert "<h1>A &amp; B</h1>" in text
    assert "abc&lt;def" in text
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,)', text)
    # Training and validation loss, speed, utilisation.
    assert text.count("<img ") == 4
    assert "<td>optimizer.lr</td><td>0.1</td><td>0.2</td>" in text
    assert "hydra.job" not in text
    assert "different numbers of targets" in text
    printed = capsys.readouterr().out
    assert re.search(r"^a/run +completed +30 +300 +1,234 +1\.5000 +2\.5000 +2\.5000 +- +70 +41\.0% +-$", printed, re.M)
    assert re.search(r"^b/run +unfinished +20 +200 ", printed, re.M)


def test_targets_between_logged_steps(tmp_path: Path) -> None:
    (run,) = find_runs([make_run(tmp_path / "run", ROWS)])
    assert [targets_at(run, step) for step in (0, 5, 10, 25, 30, 99)] == [0, 50, 100, 250, 300, 300]


def test_a_sweep_is_its_jobs_in_order(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        make_run(tmp_path / "sweep" / str(number), ROWS, lr=number)
    (tmp_path / "sweep" / "notes").mkdir()
    runs = find_runs([tmp_path / "sweep", tmp_path / "sweep" / "2"])
    assert [run.name for run in runs] == ["0", "2", "10"]
    assert differences(runs) == {"optimizer.lr": [0, 2, 10]}


def test_bad_losses_and_failures_are_remarked(tmp_path: Path) -> None:
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": "nan"}, {"step": 3, "train/loss": "inf"}]
    run = make_run(tmp_path / "run", rows, results={"status": "failed", "error": "NaN at step 2"})
    output = tmp_path / "report.html"
    assert main(["compare", str(run), "--output", str(output)]) == 0
    assert "not finite at step 2 and 1 others" in output.read_text()
    assert "run: failed: NaN at step 2" in output.read_text()


def test_recorded_runs(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    assert main(["compare", str(TINY), "--output", str(output), "--by", "steps"]) == 0
    assert 'alt="Held-out loss by position in the document"' in output.read_text()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "no such folder"),
        ("empty", "holds no run"),
        ("row", "cannot be read"),
        ("json", "cannot be read"),
        ("kind", "cannot be read"),
        ("taken", "exists already"),
    ],
)
def test_refusals(fault: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = tmp_path / "run", tmp_path / "report.html"
    if fault == "empty":
        run.mkdir()
    elif fault != "missing":
        make_run(run, ROWS)
    if fault == "row":
        (run / "logs" / "metrics.csv").write_text("step,train/loss\nten,3\n")
    elif fault == "json":
        (run / "results.json").write_text("{")
    elif fault == "kind":
        (run / "environment.json").write_text('{"packages": null}')
    elif fault == "taken":
        output.write_text("mine")
    assert main(["compare", str(run), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert output.exists() == (fault == "taken")
