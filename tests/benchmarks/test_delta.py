"""``samu-lm bench delta`` on sizes of a second: the seed's fields, what is left out, what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.benchmarks import delta, delta_scale
from samu_lm.benchmarks.delta_cases import NAMES, peak_bytes
from samu_lm.benchmarks.delta_table import table
from samu_lm.errors import ConfigError


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    delta.add_arguments(parser)
    return parser.parse_args(words)


def _measure(tmp_path: Path, *words: str) -> dict[str, Any]:
    output = tmp_path / "new" / "delta.json"
    small = ["--batch", "1", "--heads", "2", "--repeats", "2", "--output", str(output)]
    assert delta.run(_arguments(*small, *words)) == 0
    return json.loads(output.read_text())


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = _measure(tmp_path, "--seq-lens", "64", "--dims", "16")
    assert set(result) == {"device", "config", "results"}
    rows = {(row["impl"], row["mode"]): row for row in result["results"]}
    assert set(rows) == {(i, m) for i in ("recurrent", "chunked", "chunked_fat", "ssd") for m in ("fwd", "fwd_bwd")}
    for (impl, mode), row in rows.items():
        if impl == "ssd":
            assert row["error"].startswith("RuntimeError: implementation='ssd' requires an accelerator")
            continue
        assert row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert 0 < row["rel_err"] < 1e-6
        assert row["xla_temp_mb"] > 0
        assert ("residual_mb" in row) == (mode == "fwd_bwd")
        if mode == "fwd_bwd":
            assert set(row["rel_err_grads"]) == set(NAMES)
    kept = {impl: rows[impl, "fwd_bwd"]["residual_mb"] for impl in ("recurrent", "chunked", "chunked_fat")}
    assert kept["chunked"] == 2 * 16 * 16 * 4 / 2**20
    assert kept["chunked"] < kept["chunked_fat"] < kept["recurrent"]
    text = (tmp_path / "new" / "delta.md").read_text()
    assert text == table(result)
    assert text.count("\n| ") == 1 + len(rows)  # the header, and a line per row


def test_jax_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    result = _measure(tmp_path, "--seq-lens", "128", "--dims", "16", "--impls", "chunked", "--jax")
    rows = [row for row in result["results"] if row["impl"] == delta.JAX]
    assert [row["mode"] for row in rows] == ["fwd", "fwd_bwd"]
    assert all(row["rel_err"] < 1e-6 for row in rows)


def _result(*rows: dict[str, Any]) -> dict[str, Any]:
    device = {
        "devices": [], "cores": 2, "cpu_threads": 2, "platform": "Linux", "packages": {"torch": "2.9"}, "jax": "0.8",
        "load_average": [0.5, 1.25], "command": ["python", "__main__.py", "bench", "delta"],
    }  # fmt: skip
    config = {"batch": 2, "heads": 8, "dtypes": ["float32"], "chunk_sizes": [64], "repeats": 7}
    return {"device": device, "config": config, "results": list(rows)}


def _timed(impl: str, mode: str, median: float, **more: Any) -> dict[str, Any]:
    times = {"median_ms": median, "q1_ms": median - 1, "q3_ms": median + 1, "cpu_ms": 2 * median, "rel_err": 2.5e-7}
    return {"impl": impl, "mode": mode, "seq": 2048, "dk": 64, **times, **more}


def test_table_by_hand() -> None:
    result = _result(
        _timed("recurrent", "fwd", 30.0, xla_temp_mb=32.5),
        _timed("chunked", "fwd", 10.0, xla_temp_mb=9.84),
        _timed("jax_chunked", "fwd", 12.5),
        {"impl": "ssd", "mode": "fwd", "seq": 2048, "dk": 64, "error": "RuntimeError: no accelerator"},
        _timed("recurrent", "fwd_bwd", 400.0, residual_mb=1568.375, xla_temp_mb=1577.4),
        _timed("chunked", "fwd_bwd", 40.0, residual_mb=8.0, xla_temp_mb=32.6),
    )
    lines = table(result).splitlines()
    assert lines[0] == "2 cores, 2 threads; Linux; torch 2.9, jax 0.8; load average 0.50, 1.25; `samu-lm bench delta`"
    assert lines[4].startswith(
        "| impl | mode | T | d | median ms (quartiles) | CPU ms | temporaries MiB | residual MiB"
    )
    assert lines[6] == "| recurrent | fwd | 2,048 | 64 | 30.00 (29.00 to 31.00) | 60.00 | 32.5 |  | 2.5e-07 |"
    assert lines[8] == "| jax_chunked | fwd | 2,048 | 64 | 12.50 (11.50 to 13.50) | 25.00 |  |  | 2.5e-07 |"
    assert lines[9] == "| ssd | fwd | 2,048 | 64 | RuntimeError: no accelerator |  |  |  |  |"
    assert lines[-1] == "- T = 2,048, d = 64: recurrent/chunked fwd 3.00, fwd_bwd 10.00; jax/chunked fwd 1.25"


def test_table_without_others_has_no_ratios() -> None:
    assert table(_result(_timed("chunked", "fwd", 10.0))).endswith("| 2.5e-07 |\n")


def test_rows_too_slow_are_left_out() -> None:
    args = _arguments()
    assert delta._too_slow(args, "recurrent", "fwd", 8192, 64)
    assert not delta._too_slow(args, "recurrent", "fwd_bwd", 2048, 64)
    assert not delta._too_slow(args, "chunked", "fwd_bwd", 8192, 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes these")
@pytest.mark.parametrize("words", [["--device", "cuda"], ["--scale"]])
def test_refused_without_a_gpu(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        delta.run(_arguments(*words))


def test_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--repeats=1: must be at least 2"):
        delta.run(_arguments("--repeats", "1"))
    with pytest.raises(ConfigError, match="--jax=cpu, bfloat16"):
        delta.run(_arguments("--jax", "--dtype", "bfloat16"))
    with pytest.raises(ConfigError, match="multiples of 64 only"):
        delta.run(_arguments("--jax", "--seq-lens", "100"))


def test_peak_counts_what_is_freed_again() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(2**18)  # 1 MiB
        return (a + a).sum()

    assert 2 * 2**20 <= peak_bytes(call, "cpu") < 2.1 * 2**20


def test_flops_by_hand() -> None:
    """64 tokens, dk = dv = 128: 2 * 64 * 64 * 128 = 2^20 FLOPs a product inside the chunk, twice that by the state."""
    mib, inverse = 2**20, 2 * 64**3 // 3
    assert delta_scale.chunk_flops(64, 128, 128) == (4 * mib + 3 * 2 * mib + inverse, (3 + 8 + 14) * mib + inverse)
