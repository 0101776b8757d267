"""The Markdown table of ``samu-lm bench delta``, written beside its JSON."""

from __future__ import annotations

from typing import Any

from samu_lm.benchmarks.report import line

JAX = "jax_chunked"
_COLUMNS = (
    "impl", "mode", "T", "d", "median ms (quartiles)", "CPU ms", "temporaries MiB", "residual MiB",
    "worst relative error",
)  # fmt: skip


def _origin(result: dict[str, Any]) -> str:
    """First line: GPUs if any, machine, versions, load and command."""
    device = result["device"]
    names = [*device["devices"], f"{device['cores']} cores, {device['cpu_threads']} threads", device["platform"]]
    versions = [f"torch {device['packages']['torch']}", *([f"jax {device['jax']}"] if "jax" in device else [])]
    load = ", ".join(f"{value:.2f}" for value in device["load_average"])
    command = " ".join(["samu-lm", *device["command"][2:]])
    return f"{'; '.join(names)}; {', '.join(versions)}; load average {load}; `{command}`"


def _cells(row: dict[str, Any]) -> list[str]:
    start = [row["impl"], row["mode"], f"{row['seq']:,}", str(row["dk"])]
    if "error" in row:
        return [*start, row["error"], *[""] * 4]

    def mebibytes(key: str) -> str:
        return f"{row[key]:.1f}" if key in row else ""

    return [
        *start,
        f"{row['median_ms']:.2f} ({row['q1_ms']:.2f} to {row['q3_ms']:.2f})",
        f"{row['cpu_ms']:.2f}",
        mebibytes("xla_temp_mb"),
        mebibytes("residual_mb"),
        f"{row['rel_err']:.1e}",
    ]


def _ratios(rows: list[dict[str, Any]], seq: int, d: int) -> str | None:
    """How many times longer others take than ``chunked``, by medians; None where no other was measured."""
    medians = {
        (row["impl"], row["mode"]): row["median_ms"]
        for row in rows
        if (row["seq"], row["dk"]) == (seq, d) and "error" not in row
    }
    parts = []
    for other in ("recurrent", JAX):
        ratios = [
            f"{mode} {medians[other, mode] / medians['chunked', mode]:.2f}"
            for mode in ("fwd", "fwd_bwd")
            if (other, mode) in medians and ("chunked", mode) in medians
        ]
        if ratios:
            parts.append(f"{other.removesuffix('_chunked')}/chunked {', '.join(ratios)}")
    return f"- T = {seq:,}, d = {d}: {'; '.join(parts)}" if parts else None


def table(result: dict[str, Any]) -> str:
    """Markdown: a line per row, then per shape how many times longer the token loop and JAX take than ``chunked``."""
    config, rows = result["config"], result["results"]
    shapes = dict.fromkeys((row["seq"], row["dk"]) for row in rows)
    ratios = [text for seq, d in shapes if (text := _ratios(rows, seq, d))]
    lines = [
        _origin(result),
        "",
        f"B = {config['batch']}, H = {config['heads']}, dk = dv = d, {config['dtypes'][0]}, chunks of "
        f"{config['chunk_sizes'][0]}; {config['repeats']} samples per row. Errors are the worst of output and "
        "gradients, against float64.",
        "",
        line(_COLUMNS),
        "|---" * len(_COLUMNS) + "|",
        *(line(_cells(row)) for row in rows),
    ]
    return "\n".join([*lines, *(["", *ratios] if ratios else [])]) + "\n"
