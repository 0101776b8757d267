"""Figures in the README are those of the recorded results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("model", ["samu_tiny", "rglru_tiny"])
def test_table_of_the_tiny_models(model: str) -> None:
    row = re.search(rf"^\| `{model}` \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    cells = [cell.strip() for cell in row[1].split("|")]
    run = json.loads((RESULTS / "tiny" / model / "results.json").read_text())
    measured = json.loads((RESULTS / "tiny" / model / "evaluation.json").read_text())
    assert cells == [
        f"{run['parameters']:,}",
        f"{measured['nats_per_token']:.4f}",
        f"{measured['perplexity']:.3f}",
        f"{measured['bits_per_byte']:.4f}",
        f"{measured['unigram_bits_per_byte']:.4f}",
    ]
    assert measured["bits_per_byte"] < measured["unigram_bits_per_byte"], "a model must beat the floor"


def test_every_record_names_its_origin() -> None:
    """Versions, machine and command lie beside every recorded figure."""
    folders = {path.parent for path in RESULTS.rglob("results.json")}
    assert folders
    for folder in folders:
        origin = json.loads((folder / "environment.json").read_text())
        assert {"command", "packages", "platform", "python", "git_commit"} <= origin.keys()
