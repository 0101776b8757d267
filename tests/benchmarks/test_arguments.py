"""What benchmarks refuse before they measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samu_lm.benchmarks.arguments import check_output, check_positive
from samu_lm.cli import main
from samu_lm.errors import ConfigError


def test_outputs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "x.json", "cannot be written"),
        (Path("/proc/x.json"), "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=rf"--output={path}: {reason}"):
            check_output(path)
    check_output(tmp_path / "new" / "x.json")
    check_output(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    assert not list((tmp_path / "new").iterdir())


def test_numbers() -> None:
    check_positive(rounds=1, seq_lens=[1, 2])
    with pytest.raises(ConfigError, match=r"--seq-lens=-3: must be at least 1"):
        check_positive(rounds=1, seq_lens=[1, -3])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--seq-lens", "0"], "--seq-lens=0"),
        (["--batch", "0"], "--batch=0"),
        (["--heads", "-1"], "--heads=-1"),
        (["--dims", "0"], "--dims=0"),
        (["--output", "/proc/x.json"], "--output=/proc/x.json"),
        (["--scale"], "--scale=yes"),
    ],
)
def test_delta_refuses_before_it_measures(arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "delta", *arguments]) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[{}], [1]])
def test_half_a_result_is_no_report(rows: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": rows, "copy_tb_s": 1, "environment": {}}))
    assert main(["bench", "mixer", "--report", str(path)]) == 2
    assert "is no whole result" in capsys.readouterr().err
