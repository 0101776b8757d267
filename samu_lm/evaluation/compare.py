"""``samu-lm compare RUN...``: one report on several runs, an HTML file that holds its pictures.

Curves of loss, speed, utilisation, memory and gradient norm, the loss by position in the document where the runs were
evaluated, what differs between their configs, and what they ran on.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samu_lm.errors import ConfigError
from samu_lm.evaluation.runs import Run, differences, find_runs

_COLOURS = ("#0b5fa5", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#0f766e", "#be185d", "#4b5563")
# Logged name, title, unit; drawn where a run logged it.
CURVES = (
    ("train/loss", "Training loss", "nats per target"),
    ("val/loss", "Validation loss", "nats per target"),
    ("tokens_per_second", "Speed", "targets per second"),
    ("mfu", "Utilisation", "share of the peak FLOP/s"),
    ("memory/allocated", "GPU memory, peak", "GiB"),
    ("memory/rss", "Process memory, peak", "GiB"),
    ("grad_norm", "Gradient norm", ""),
    ("lr", "Learning rate", ""),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.epilog = "example: samu-lm compare runs/a runs/b --output report.html"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or of sweeps")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="HTML file (default report.html)")
    parser.add_argument("--by", choices=("targets", "steps"), default="targets", help="horizontal axis of the curves")
    parser.add_argument("--title", default="Training runs", help="heading of the report")


def run(args: argparse.Namespace) -> int:
    """Writes the report, prints the summary and where the report lies."""
    if args.output.exists():
        raise ConfigError("--output", args.output, "exists already; give another file")
    runs = find_runs(args.runs)
    text = report(runs, args.title, args.by)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        partial = args.output.with_name(f".{args.output.name}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(args.output)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError("--output", args.output, f"cannot be written ({error.strerror})") from error
    header, rows = summary(runs)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"report: {args.output}")
    return 0


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and one row per run: outcome, loss, speed, memory."""
    header = ["run", "status", "steps", "targets", "parameters", "train/loss", "val/loss", "best val/loss"]
    header += ["bits per byte", "targets/s", "utilisation", "memory, GiB"]
    rows = []
    for each in runs:
        results, evaluated = each.results, each.evaluation
        validation = [value for _, value in each.series.get("val/loss", ())]
        memory = each.last("memory/allocated")
        bits = evaluated.get("bits_per_byte", each.last("val/bits_per_byte"))
        steps = max((points[-1][0] for points in each.series.values()), default=0)
        mfu = each.median("mfu")
        rows.append(
            [
                each.name,
                str(results.get("status", "unfinished")),
                f"{steps:,}",
                _text(each.last("targets_seen"), ",.0f"),
                _text(results.get("parameters"), ",.0f"),
                _text(each.last("train/loss"), ".4f"),
                _text(each.last("val/loss"), ".4f"),
                _text(min(validation, default=None), ".4f"),
                _text(bits, ".4f"),
                _text(each.median("tokens_per_second"), ",.0f"),
                "-" if mfu is None else f"{mfu:.1%}",
                _text(each.last("memory/rss") if memory is None else memory, ".2f"),
            ]
        )
    return header, rows


def _picture(draw: Callable[[Any], None], height: float = 3.4) -> str:
    """An ``<img>`` with its PNG inside."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8dee4", lw=0.7)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(axes.get_title(loc="left"))}" src="data:image/png;base64,{encoded}">'


def _along(each: Run, name: str, by: str) -> tuple[list[float], list[float]]:
    """Points of a series over steps, or over the targets seen by each step."""
    points = each.series[name]
    places = [float(step) if by == "steps" else targets_at(each, step) for step, _ in points]
    return places, [value for _, value in points]


def targets_at(each: Run, step: int) -> float:
    """Targets seen by a step: as logged, or on the line between the nearest logged steps (and 0 at step 0)."""
    known = [(0, 0.0), *each.series["targets_seen"]]
    after = next((i for i, (at, _) in enumerate(known) if at >= step), len(known) - 1)
    (left, low), (right, high) = known[max(0, after - 1)], known[after]
    return high if right <= left or step >= right else low + (high - low) * (step - left) / (right - left)


def curve(runs: Sequence[Run], name: str, title: str, unit: str, by: str) -> str | None:
    """The picture of one series of all runs that logged it, None where none did; dotted lines are resumptions."""
    drawn = [(i, each) for i, each in enumerate(runs) if name in each.series]
    if not drawn:
        return None
    axis = "targets" if by == "targets" and all("targets_seen" in each.series for _, each in drawn) else "steps"

    def draw(axes: Any) -> None:
        for i, each in drawn:
            xs, ys = _along(each, name, axis)
            colour = _COLOURS[i % len(_COLOURS)]
            axes.plot(xs, ys, label=each.name, color=colour, lw=1.3, marker="o" if len(xs) < 40 else None, ms=3)
            for step in each.resumed_at:
                axes.axvline(targets_at(each, step) if axis == "targets" else step, color=colour, lw=0.9, ls=":")
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_xlabel("targets seen" if axis == "targets" else "optimizer step")
        axes.set_ylabel(unit)

    return _picture(draw)


def by_position(runs: Sequence[Run]) -> str | None:
    """The loss over the position in the document, of the runs whose folder holds an ``evaluation.json``."""
    drawn = [(i, each) for i, each in enumerate(runs) if each.evaluation.get("by_position")]
    if not drawn:
        return None

    def draw(axes: Any) -> None:
        for i, each in drawn:
            bins = each.evaluation["by_position"]
            xs = [(b["first"] * b["last"]) ** 0.5 for b in bins]
            errors = [b["standard_error"] or 0.0 for b in bins]
            ys = [b["nats_per_token"] for b in bins]
            axes.errorbar(
                xs, ys, yerr=errors, label=each.name, color=_COLOURS[i % len(_COLOURS)], lw=1.3, marker="o", ms=3
            )
        axes.set_xscale("log", base=2)
        axes.set_title("Held-out loss by position in the document", loc="left", fontsize=10.5)
        axes.set_xlabel("tokens read since the document's start in this row")
        axes.set_ylabel("nats per token")

    return _picture(draw)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before comparing: bad losses, unequal lengths, other machines."""
    said = []
    for each in runs:
        if bad := each.not_finite():
            said.append(f"{each.name}: the training loss is not finite at step {bad[0]:,} and {len(bad) - 1} others.")
        if each.results.get("status", "completed") != "completed":
            said.append(f"{each.name}: {each.results['status']}: {each.results.get('error', 'no error recorded')}")
    seen = {each.last("targets_seen") for each in runs}
    if len(seen) > 1:
        said.append("The runs saw different numbers of targets; compare the curves at equal targets, not their ends.")
    for key, what in (("git_commit", "code"), ("platform", "machines")):
        if len({each.environment.get(key) for each in runs}) > 1:
            said.append(f"The runs come from different {what}; speeds and losses may differ for that alone.")
    return said


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #d8dee4; white-space: nowrap }
th { color: #6e7781; font-weight: 600 } .wide { overflow-x: auto }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1rem }
img { width: 100%; height: auto } .remark { border-left: 3px solid #c2410c; padding-left: .7rem; margin: .4rem 0 }
"""


def report(runs: Sequence[Run], title: str, by: str) -> str:
    """The whole HTML document; it refers to nothing outside itself."""
    pictures = [curve(runs, name, heading, unit, by) for name, heading, unit in CURVES] + [by_position(runs)]
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f'<p class="remark">{html.escape(remark)}</p>' for remark in remarks(runs)]
    parts += ["<h2>Summary</h2>", _table(*summary(runs)), "<h2>Curves</h2>"]
    parts.append('<div class="curves">' + "".join(p for p in pictures if p is not None) + "</div>")
    if found := differences(list(runs)):
        rows = [[key, *("-" if value is None else str(value) for value in values)] for key, values in found.items()]
        parts += ["<h2>Where the configs differ</h2>", _table(["key", *(each.name for each in runs)], rows)]
    ran = [
        [
            each.name,
            " ".join(str(word) for word in each.environment.get("command", ())) or "-",
            str(each.environment.get("git_commit") or "-")[:12],
            str(each.environment.get("packages", {}).get("torch", "-")),
            str(each.environment.get("gpu") or each.environment.get("platform", "-")),
            str(each.environment.get("time", "-")),
        ]
        for each in runs
    ]
    parts += ["<h2>What ran</h2>", _table(["run", "command", "commit", "torch", "machine", "started"], ran)]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
