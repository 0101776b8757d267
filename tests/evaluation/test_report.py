"""Plot, table and notes at their edges: one bin, many bins, figures that are not defined."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from samu_lm.errors import ConfigError, WriteError
from samu_lm.evaluation import report


def figures(bins: int, **changes: Any) -> dict[str, Any]:
    """Figures with so many position bins, the loss falling and the counts growing."""
    by_position = [
        {
            "first": 2**k // 2 + 1,
            "last": 2**k,
            "targets": 2**k,
            "bytes": 2**k,
            "nats": 3.0 * 2**k,
            "nats_per_token": 1 + 4 / (k + 1),
            "standard_error": 0.5 / (k + 1) if k else None,
        }
        for k in range(bins)
    ]
    plain = {
        "targets": 2**bins - 1,
        "bytes": 2**bins - 1,
        "nats_per_token": 3.0,
        "perplexity": math.exp(3),
        "bits_per_byte": 4.25,
        "unigram_bits_per_byte": 4.0,
        "ratio_to_unigram": 1.0625,
        "by_position": by_position,
        "documents": 3,
        "tokens": 2**bins,
        "rows": 1,
        "seq_len": 2**bins,
        "notes": [],
    }
    return plain | changes


@pytest.mark.parametrize("bins", [1, 2, 9, 21])
def test_plot_of_any_number_of_bins(bins: int, tmp_path: Path) -> None:
    report.plot_loss_by_position(tmp_path / "plot.png", figures(bins), title="a model\nsome data")
    picture = imread(tmp_path / "plot.png")
    assert picture.shape[0] > 500
    with pytest.raises(FileExistsError):
        report.plot_loss_by_position(tmp_path / "plot.png", figures(bins), title="again")


def test_table_of_undefined_figures() -> None:
    text = report.table(figures(3, bits_per_byte=None, ratio_to_unigram=None, perplexity=None), title="a model")
    lines = {line.strip().rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in text.splitlines() if line.strip()}
    assert lines["bits per byte"] == lines["perplexity"] == "-"
    assert lines["byte unigrams"] == "4.0000"
    assert "not beaten" in report.table(figures(3), title="a model")
    assert "not beaten" not in report.table(figures(3, ratio_to_unigram=0.9), title="a model")


def test_table_wraps_notes() -> None:
    notes = report.notes(continued_rows=12_345, partial=True)
    assert len(notes) == 2
    assert notes[0].startswith("12,345 rows start inside a document")
    text = report.table(figures(3, notes=notes), title="a model")
    assert max(map(len, text.splitlines())) <= 80
    assert report.notes(0, partial=False) == []
    assert report.notes(1, partial=False)[0].startswith("1 row starts")


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (950, "950"), (1000, "1k"), (1234, "1.2k"), (34_400, "34k"), (5_600_000, "5.6M")]
)
def test_compact(value: int, shown: str) -> None:
    assert report.compact(value) == shown


def test_json_is_new_and_valid(tmp_path: Path) -> None:
    report.write_json(tmp_path / "a.json", {"x": 1.5, "y": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1.5, "y": None}
    with pytest.raises(FileExistsError):
        report.write_json(tmp_path / "a.json", {})
    with pytest.raises(ValueError, match="JSON"):
        report.write_json(tmp_path / "b.json", {"x": math.nan})
    assert not (tmp_path / "b.json").exists()


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports it when the file is closed."""
    opened = io.open

    def full(*args: Any, **options: Any) -> Any:
        file = opened(*args, **options)
        device = opened("/dev/full", "wb", buffering=0)
        os.dup2(device.fileno(), file.fileno())
        device.close()
        return file

    monkeypatch.setattr(io, "open", full)
    with pytest.raises(WriteError, match=r"a\.json: cannot be written \(No space left on device\); free space") as e:
        report.write_json(tmp_path / "a.json", {"x": 1.5})
    assert e.value.exit_status == 4
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^output=.*cannot be written"):
        report.make_folder(tmp_path / "file" / "below")
    report.make_folder(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
