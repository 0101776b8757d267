from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from samu_lm.training.curve import draw_curve


def test_draws_both_losses_with_names_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss\n1,3.0,\n2,2.0,\n2,,2.5\n3,1.5,\n")
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    assert draw_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert axes.get_xlabel() == "optimizer step"
    assert axes.get_ylabel() == "loss [nats per target]"
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {"training": ([1, 2, 3], [3.0, 2.0, 1.5]), "validation": ([2], [2.5])}


@pytest.mark.parametrize("content", [None, "", "step,lr\n1,0.1\n"])
def test_no_picture_without_a_loss(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    assert not draw_curve(tmp_path / "metrics.csv", tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
