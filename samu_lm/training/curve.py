"""Draws a run's loss curve from its CSV log."""

from __future__ import annotations

from pathlib import Path

from samu_lm.training.loggers import read_rows


def draw_curve(metrics: Path, picture: Path) -> bool:
    """Draws training and validation loss over optimizer steps.

    Args:
        metrics: ``metrics.csv``.
        picture: the PNG file to write.

    Returns:
        Whether there was anything to draw; without a loss in the file no picture is written.
    """
    rows = read_rows(metrics)
    series = {
        name: [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        for name in ("train/loss", "val/loss")
    }
    if not any(series.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = {"train/loss": {"linewidth": 1.0, "alpha": 0.7}, "val/loss": {"linewidth": 2.0, "marker": "o"}}
    labels = {"train/loss": "training", "val/loss": "validation"}
    for name, points in series.items():
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=labels[name], **styles[name])  # type: ignore[arg-type]
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss [nats per target]")
    axes.set_title("Training curve")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
    return True
