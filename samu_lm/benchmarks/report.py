"""Tables and plots made from recorded results, never from numbers typed in."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samu_lm.benchmarks.cases import MIXERS

MIB = 2**20


def command() -> str:
    """The command line as a result records it."""
    return " ".join(["samu-lm", *sys.argv[1:]])


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, whole or as far as it has come."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write_table(path: Path, text: str) -> None:
    """Writes a result's table beside ``path``, the JSON's, and prints it."""
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def origin(result: dict[str, Any]) -> str:
    """First line of a table: machine, versions, copy ceiling where it was measured, command."""
    environment = result["environment"]
    ceiling = f"copy ceiling {result['copy_tb_s']:.2f} TB/s; " if "copy_tb_s" in result else ""
    return (
        f"{environment['gpu']}, torch {environment['torch']}, triton {environment['triton']}; "
        f"{ceiling}`{result['command']}`"
    )


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _shape(row: dict[str, Any]) -> str:
    s = row["shape"]
    return f"({s['batch']}, {s['length']}, {s['width']})"


def mixer_table(result: dict[str, Any]) -> str:
    """Markdown table of ``samu-lm bench mixer``."""
    lines = [
        origin(result),
        "",
        "Medians in ms. forward and fwd+bwd: the host is ahead of the device, as in training; eager: one call at a "
        "time, host work included; graph: a CUDA graph's replay. of copy: the least bytes that a pass must move, at "
        "the copy ceiling, over its time, forward / fwd+bwd.",
        "",
        "| (B, L, W) | mixer | resets | forward | fwd+bwd | of copy | eager forward | eager backward | eager fwd+bwd "
        "| graph fwd+bwd | peak MiB | launches | parameters | control values per token |",
        "|---" * 14 + "|",
    ]
    for row in result["rows"]:
        cells = [
            _shape(row),
            row["architecture"],
            row["resets"],
            f"{row['forward_queued_ms']:.3f}",
            f"{row['forward_backward_queued_ms']:.3f}",
            f"{row['forward_fraction_of_copy']:.0%} / {row['forward_backward_fraction_of_copy']:.0%}",
            *(f"{row[phase]['median_ms']:.3f}" for phase in ("forward", "backward", "forward_backward")),
            f"{row['forward_backward_graph_ms']:.3f}",
            f"{row['peak_allocated_delta_bytes'] / MIB:.0f}",
            str(len(row["launches"])),
            f"{row['parameters']:,}",
            f"{row['dynamic_control_values_per_token']:,}",
        ]
        lines.append(line(cells))
    return "\n".join(lines) + "\n"


def plot_mixer(result: dict[str, Any], path: Path) -> None:
    """Bars of forward + backward per shape, and the copy floor, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["resets"] == "internal" and row["architecture"] in MIXERS]
    rows = rows or [row for row in result["rows"] if row["resets"] == "internal"]
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    names = list(dict.fromkeys(row["architecture"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.3 * len(shapes), 4))
    wide = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        heights = {_shape(row): row["forward_backward_queued_ms"] for row in rows if row["architecture"] == name}
        axes.bar([x + i * wide for x in range(len(shapes))], [heights.get(s, 0.0) for s in shapes], wide, label=name)
    floors = {_shape(row): row["floor_forward_backward_ms"] for row in rows}
    for x, shape in enumerate(shapes):  # the mixers' floor is the same for both
        axes.hlines(floors[shape], x - wide / 2, x + len(names) * wide - wide / 2, colors="black")
    axes.hlines([], 0, 0, colors="black", label="copy floor")
    axes.set_yscale("log")
    axes.set_ylabel("forward + backward, ms")
    axes.set_xticks([x + wide * (len(names) - 1) / 2 for x in range(len(shapes))], shapes, rotation=20, ha="right")
    axes.set_title(f"Whole mixers, internal resets, {result['environment']['gpu']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
