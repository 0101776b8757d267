from __future__ import annotations

import json
from pathlib import Path

from omegaconf import OmegaConf

from samu_lm.training.record import write_json, write_record


def test_config_overrides_and_environment(tmp_path: Path) -> None:
    write_record(tmp_path / "run", {"seed": 3, "model": {"width": 8}}, ["seed=3", "data.path='${x}'"])
    assert OmegaConf.load(tmp_path / "run" / "config.yaml") == {"seed": 3, "model": {"width": 8}}
    overrides = OmegaConf.to_container(OmegaConf.load(tmp_path / "run" / "overrides.yaml"), resolve=False)
    assert overrides == ["seed=3", "data.path='${x}'"]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert "git_commit" in environment
    assert environment["command"]


def test_json_is_json_also_of_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": {"c": float("inf")}, "d": 1.5})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": {"c": None}, "d": 1.5}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
