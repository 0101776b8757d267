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


def test_jax_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    result = _measure(tmp_path, "--seq-lens", "128", "--dims", "16", "--impls", "chunked", "--jax")
    rows = [row for row in result["results"] if row["impl"] == delta.JAX]
    assert [row["mode"] for row in rows] == ["fwd", "fwd_bwd"]
    assert all(row["rel_err"] < 1e-6 for row in rows)


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
