"""What an evaluation leaves behind: a JSON file, a plot of the loss by position, a table for the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samu_lm.entry import probe_folder
from samu_lm.errors import ConfigError, WriteError
from samu_lm.evaluation.totals import NATS_PER_BIT

JSON_NAME = "evaluation.json"
PLOT_NAME = "loss_by_position.png"
SAMPLES_NAME = "samples.json"
_INK, _MUTED, _GRID, _LINE, _FLOOR = "#1f2328", "#6e7781", "#d8dee4", "#0b5fa5", "#c2410c"


def refuse_taken(folder: Path, names: tuple[str, ...]) -> None:
    """Raises ConfigError, `output=FOLDER`, where one of the files to be written exists."""
    if taken := [name for name in names if (folder / name).exists()]:
        raise ConfigError("output", folder, f"already holds {', '.join(taken)}; give another folder")


def make_folder(folder: Path) -> None:
    """Makes the folder of the results.

    Raises:
        ConfigError: `output=FOLDER`: it is a file, or cannot be made.
        WriteError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", folder, f"cannot be written to ({error.strerror}); give another folder") from error
    probe_folder(folder, f"output={folder}")


def _write_new(path: Path, content: bytes) -> None:
    """Writes a file that was not there, and is not if it cannot be written in full (WriteError)."""
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        remedy = "free space, or give another folder as output"
        raise WriteError(f"{path}: cannot be written ({error.strerror}); {remedy}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a new file; an existing one is never replaced (FileExistsError).

    Raises:
        WriteError: it cannot be written.
    """
    text = json.dumps(content, indent=2, allow_nan=False)
    _write_new(path, f"{text}\n".encode())


def plot_loss_by_position(path: Path, figures: Mapping[str, Any], *, title: str) -> None:
    """Draws nats per token over the position in the document, with the number of targets behind each point.

    Args:
        path: PNG to write.
        figures: as `summarise` returns them.
        title: names the model and the data.

    Raises:
        WriteError: it cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    bins = figures["by_position"]
    lefts, rights = [b["first"] - 0.5 for b in bins], [b["last"] + 0.5 for b in bins]
    centres = [(b["first"] * b["last"]) ** 0.5 for b in bins]
    reach = [[c - left for c, left in zip(centres, lefts)], [right - c for c, right in zip(centres, rights)]]
    figure = Figure(figsize=(8, 5.4), dpi=150, layout="constrained")
    loss, count = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    errors = [b["standard_error"] or 0.0 for b in bins]
    values = [b["nats_per_token"] for b in bins]
    loss.errorbar(centres, values, yerr=errors, xerr=reach, fmt="o", ms=4, color=_LINE, elinewidth=1.3, capsize=0)
    floor = _floor_in_nats(figures)
    loss.axhline(floor, color=_FLOOR, lw=1.3, ls=(0, (5, 3)))
    label = f"byte unigrams, the floor to beat: {floor:.2f}"
    place: dict[str, Any] = {"xy": (1.0, floor), "xycoords": ("axes fraction", "data"), "xytext": (-4, 4)}
    loss.annotate(label, **place, **_TEXT, ha="right", color=_FLOOR)
    loss.set_ylim(bottom=0, top=1.12 * max([floor, *(v + e for v, e in zip(values, errors))]))
    loss.set_ylabel("loss (nats per token ± standard error)")
    loss.set_title(title, loc="left", fontsize=10.5, color=_INK)
    for b, left, right, centre in zip(bins, lefts, rights, centres):
        count.fill_between([left, right], 0.5, b["targets"], color=_LINE, alpha=0.22, lw=0)
        label = compact(b["targets"])
        count.annotate(label, (centre, b["targets"]), xytext=(0, 2), **_TEXT, ha="center", color=_MUTED)
    count.set_yscale("log")
    count.set_ylim(0.5, 6 * max(b["targets"] for b in bins))
    count.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    count.set_ylabel("targets")
    count.set_xscale("log", base=2)
    count.set_xlim(lefts[0], rights[-1])
    count.set_xlabel("position in the document (tokens read since its start in this row)")
    count.set_xticks([b["last"] for b in bins][:: max(1, len(bins) // 12)])
    count.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value, binary=True)))
    loss.yaxis.set_major_locator(MaxNLocator(6))
    for axes in (loss, count):
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_GRID, lw=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_MUTED, labelsize=8.5)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    _write_new(path, drawn.getvalue())


_TEXT: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5}


def _floor_in_nats(figures: Mapping[str, Any]) -> float:
    """The byte-unigram entropy in nats per token: a token stands for so many bytes on average."""
    return figures["unigram_bits_per_byte"] * NATS_PER_BIT * figures["bytes"] / figures["targets"]


def compact(value: float, binary: bool = False) -> str:
    """A count in at most four characters or so: 950, 1.2k, 34k, 5.6M; with binary, k is 1024."""
    base = 1024 if binary else 1000
    for size, suffix in ((base**3, "G"), (base**2, "M"), (base, "k")):
        if value >= size:
            scaled = value / size
            return f"{scaled:.1f}".removesuffix(".0") + suffix if scaled < 10 else f"{scaled:.0f}{suffix}"
    return f"{value:.0f}"


def notes(continued_rows: int, partial: bool) -> list[str]:
    """What a reader of the figures must know.

    Args:
        continued_rows: rows that start inside a document.
        partial: whether only some rows of the split were evaluated.
    """
    said = []
    if continued_rows:
        start = "row starts" if continued_rows == 1 else "rows start"
        said.append(
            f"{continued_rows:,} {start} inside a document; there state and position start afresh, as in training"
        )
    if partial:
        said.append("only the first rows of the split were read; the entropy of byte unigrams is the whole split's")
    return said


def samples_text(texts: Sequence[str], *, title: str) -> str:
    """Samples under each other, each with a heading."""
    parts = [title]
    for number, text in enumerate(texts, start=1):
        heading = f"sample {number} of {len(texts)}" if len(texts) > 1 else "sample"
        parts.append(f"-- {heading} ".ljust(60, "-") + f"\n{text}")
    return "\n\n".join(parts)


def table(outcome: Mapping[str, Any], *, title: str) -> str:
    """The figures as a person reads them.

    Args:
        outcome: as `summarise` returns it, with documents, tokens, rows, seq_len and notes.
        title: first lines.
    """
    bits, floor, ratio = outcome["bits_per_byte"], outcome["unigram_bits_per_byte"], outcome["ratio_to_unigram"]
    lines = [
        title,
        "",
        f"  {'documents':<16}{outcome['documents']:>14,}",
        f"  {'tokens':<16}{outcome['tokens']:>14,}    in {outcome['rows']:,} rows of {outcome['seq_len']:,}",
        f"  {'targets':<16}{outcome['targets']:>14,}",
        f"  {'bytes':<16}{outcome['bytes']:>14,}",
        "",
        f"  {'nats per token':<16}{outcome['nats_per_token']:>14.4f}",
        f"  {'perplexity':<16}{_or_dash(outcome['perplexity'], '14.3f')}",
        f"  {'bits per byte':<16}{_or_dash(bits, '14.4f')}",
    ]
    verdict = "" if ratio is None else f"    model / floor = {ratio:.3f}" + ("" if ratio < 1 else ", not beaten")
    lines.append(f"  {'  byte unigrams':<16}{floor:>14.4f}{verdict}")
    lines += ["", f"  {'position':>15}{'targets':>12}{'nats per token':>17}"]
    for b in outcome["by_position"]:
        span = f"{b['first']:,}" if b["first"] == b["last"] else f"{b['first']:,} to {b['last']:,}"
        error = "" if b["standard_error"] is None else f" ± {b['standard_error']:.4f}"
        lines.append(f"  {span:>15}{b['targets']:>12,}{b['nats_per_token']:>17.4f}{error}")
    for note in outcome["notes"]:
        lines += ["", *textwrap.wrap(f"{note}.", 76, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines)


def _or_dash(value: float | None, form: str) -> str:
    return format("-", f">{form.split('.')[0]}") if value is None else format(value, form)
