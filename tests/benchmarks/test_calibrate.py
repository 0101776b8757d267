"""``samu-lm calibrate`` and ``explain-dispatch``: the record that dispatch reads, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samu_lm.benchmarks import calibrate, cases, timing
from samu_lm.cli import main
from samu_lm.ops.common import dispatch
from samu_lm.ops.samu.kernel_plan import OP, Plan, override, plan_for


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Interpreted kernels; a call takes as many milliseconds as its plan's chunk has tokens."""
    clocked: list[Plan] = []

    def samples(call: Any, repeats: int, warmup: int = 0) -> list[float]:
        plan = override()
        assert plan is not None
        clocked.append(plan)
        return [float(plan.chunk)] * repeats

    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(calibrate, "require_gpu", lambda: None)
    monkeypatch.setattr(calibrate, "CHECKED", (1, 20))
    monkeypatch.setattr(cases, "bound_of", lambda name, dtype: 1e-2)  # the interpreter truncates bfloat16
    monkeypatch.setattr(timing, "queued_samples", samples)
    sizes = ("peak_allocated_delta_bytes", "peak_reserved_delta_bytes")
    monkeypatch.setattr(timing, "peak_memory", lambda call: dict.fromkeys(sizes, 1))
    return clocked


def test_the_fastest_is_what_runs(
    on_cpu: list[Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = tmp_path / "candidates.json"
    candidates.write_text(
        json.dumps({"long": {"chunk": 32}, "short": {"chunk": 16, "fused": True}, "odd": {"chunk": 16, "step": 3}})
    )
    output = tmp_path / "record.json"
    arguments = ["--shapes", "1,20,8", "--candidates", str(candidates), "--jobs", "1", "--output", str(output)]
    assert main(["calibrate", *arguments]) == 0
    printed = capsys.readouterr()
    assert "(1, 20, 8): short 16.000 ms, then long (+100.0%)" in printed.out
    assert "odd: left out" in printed.err
    record = json.loads(output.read_text())
    assert record["environment"].keys() >= {"gpu", "torch", "triton", "cuda"}
    assert [row["candidate"] for row in record["rows"]] == ["long", "short"]
    # Alternating order: the second round runs backwards.
    assert [[r["order_index"] for r in row["rounds"]] for row in record["rows"]] == [[0, 1], [1, 0]]
    assert record["entries"][0]["fields"] == {"chunk": 16, "fused": True}

    monkeypatch.setattr(dispatch, "record_path", lambda op: output)
    dispatch.read_record.cache_clear()
    assert plan_for(1, 4096, 8) == Plan(chunk=16, fused=True).for_shape(4096, 4)
    assert main(["explain-dispatch", "1", "4096", "8"]) == 0
    said = capsys.readouterr().out
    assert "nearest measured: (1, 20, 8), on none" in said
    assert "runs      short: 16.000 ms" in said
    assert "runner-up long: +100.0%" in said
    dispatch.read_record.cache_clear()


def test_candidates_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "candidates.json"
    assert main(["calibrate", "--candidates", str(path)]) == 2
    assert "no such file" in capsys.readouterr().err
    for content in ('{"a": {"chunks": 1}}', "{", "[]", '{"a": 3}'):
        path.write_text(content)
        assert main(["calibrate", "--candidates", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1", "32768", "1024"], "gates inside the scan; weight gradients in the gradient kernel"),
        (["4", "2048", "2048"], "gates inside the scan; weight gradients by a kernel of their own"),
        (["4", "2048", "8192"], "two steps: the gates are projected first, the scan reads their logits"),
        (["4", "2048", "2048", "--dtype", "float32"], "two steps"),
        (["4", "2048", "96", "--blocks", "1"], "1 gate blocks of 96"),
    ],
)
def test_which_path_the_rglru_takes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-dispatch", *arguments]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["1", "0", "4"], "B,L,W=1,0,4"),
        (["1", "8", "33"], "B,L,W=1,8,33"),
        (["a", "8", "4"], "B,L,W=a,8,4"),
        (["1", "8", "24", "--blocks", "16"], "--blocks=16"),
        (["1", "8", "24", "--blocks", "0"], "--blocks=0"),
    ],
)
def test_odd_shapes(arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-dispatch", *arguments]) == 2
    assert key in capsys.readouterr().err


def test_the_record_in_force() -> None:
    """The record that ships names its machine and versions, and each choice is what its shape's rows say."""
    path = dispatch.record_path(OP)
    record = json.loads(path.read_text())
    assert record["environment"].keys() >= {"gpu", "torch", "triton", "cuda"}
    assert record["command"].startswith("samu-lm calibrate")
    for entry in record["entries"]:
        shape = {name: entry[name] for name in ("batch", "length", "width")}
        rows = [row for row in record["rows"] if row["shape"] == shape]
        assert entry == calibrate.entry(tuple(shape.values()), rows, record["candidates"])  # type: ignore[arg-type]
        Plan(**entry["fields"])


def test_of_plans_that_are_as_fast_the_one_that_takes_less_memory_runs() -> None:
    def row(name: str, time: float, memory: int) -> dict[str, Any]:
        return {
            "candidate": name,
            "forward_backward": {"median_ms": time},
            "peak_allocated_delta_bytes": memory,
        }

    fields: dict[str, dict[str, Any]] = {name: {} for name in "abc"}
    fast, lean, slow = row("a", 1.0, 100), row("b", 1.02, 80), row("c", 1.04, 50)
    found = calibrate.entry((1, 2, 4), [slow, lean, fast], fields)
    assert (found["choice"], found["runner_up"]) == ("b", "a")
    assert found["margin"] == pytest.approx(1 / 1.02 - 1)
    assert calibrate.entry((1, 2, 4), [slow, fast], fields)["choice"] == "a"
    assert calibrate.entry((1, 2, 4), [lean], fields)["runner_up"] == "b"
