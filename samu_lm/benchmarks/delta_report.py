"""The Markdown table of a recorded ``samu-lm bench delta``; docs/gated-delta.md holds it as it comes out."""

from __future__ import annotations

from typing import Any


def delta_table(result: dict[str, Any]) -> str:
    """A line per shape and implementation: medians, quartiles and processor time in ms, MiB of memory, worst error."""
    rows = {(r["seq"], r["dk"], r["impl"], r["mode"]): r for r in result["results"] if "error" not in r}
    lines = [
        "| T | d | implementation | forward (quartiles) | CPU | forward + backward (quartiles) | CPU | temporaries "
        "| residuals | relative error |",
        "|---" * 10 + "|",
    ]
    for seq, d, impl in dict.fromkeys(key[:3] for key in rows):
        forward, both = (rows.get((seq, d, impl, mode)) for mode in ("fwd", "fwd_bwd"))
        worst = max(r["rel_err"] for r in (forward, both) if r is not None)
        cells = [
            f"{seq:,}",
            str(d),
            f"`{impl}`",
            *_times(forward),
            *_times(both),
            _mebibytes(both, "xla_temp_mb"),
            _mebibytes(both, "residual_mb"),
            f"{worst:.1e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _times(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "left out", ""
    return f"{row['median_ms']:.0f} ({row['q1_ms']:.0f} to {row['q3_ms']:.0f})", f"{row['cpu_ms']:.0f}"


def _mebibytes(row: dict[str, Any] | None, key: str) -> str:
    return f"{row[key]:.1f}" if row is not None and key in row else ""
