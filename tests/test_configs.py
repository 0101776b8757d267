"""Every config file composes, passes the check of keys and types, and builds what it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from samu_lm.config import config_dir, value_matches
from samu_lm.data import StdlibSource
from samu_lm.errors import ConfigError
from samu_lm.training.checks import TOP_LEVEL, check
from samu_lm.training.hardware import settle
from tests.data.preparing import prepare

GROUPS = sorted(path.name for path in config_dir().iterdir() if path.is_dir())
FILES = sorted((path.parent.name, path.stem) for path in config_dir().glob("*/*.yaml"))
# What a group's files need before their checks of paths and names pass.
NEEDED = {("data", "hub"): ["data.name=some/dataset"], ("tokenizer", "pretrained"): ["tokenizer.path=some/tokenizer"]}


def _compose(*overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose(name, list(overrides))


def _overrides(group: str, name: str, tmp_path: Path) -> list[str]:
    overrides = [f"{group}={name}", *NEEDED.get((group, name), [])]
    if group == "data" and name in ("text", "jsonl", "parquet"):
        (tmp_path / f"corpus.{name}").write_text("x")
        overrides.append(f"data.path={tmp_path}")
    if name == "shards":
        prepare(StdlibSource(max_bytes=9000), tmp_path / "shards")
        overrides = ["data=shards", f"data.path={tmp_path / 'shards'}"]
    return overrides


def test_groups_are_the_ones_a_run_reads() -> None:
    assert set(GROUPS) <= {*TOP_LEVEL, "experiment"}
    assert len(FILES) > 20


@pytest.mark.parametrize(("group", "name"), FILES, ids=lambda value: str(value))
def test_composes_and_builds(group: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if (group, name) in (("trainer", "gpu"), ("trainer", "sharded")) and not torch.cuda.is_available():
        pytest.skip("builds on a GPU only; its keys are checked in test_every_file_passes_the_check")
    cfg = _compose(*_overrides(group, name, tmp_path))
    check(cfg)
    node = cfg.get(group)
    if not isinstance(node, DictConfig):  # an experiment changes other groups
        return
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    if group in ("trainer", "experiment"):
        cfg = settle(cfg)
    for part in [cfg[group]] if "_target_" in cfg[group] else cfg[group].values():
        if isinstance(part, DictConfig) and "_target_" in part:
            extra: dict[str, Any] = {}
            if group == "data":
                extra["tokenizer"] = instantiate(cfg.tokenizer)
            if group == "model":
                part = OmegaConf.merge(part, {"vocab_size": part.vocab_size or 258})
            with torch.device("meta"):
                built = instantiate(part, **extra)
            target = get_object(part["_target_"])
            assert not isinstance(target, type) or isinstance(built, target)


@pytest.mark.parametrize(("group", "name"), FILES, ids=lambda value: str(value))
def test_every_file_passes_the_check(group: str, name: str, tmp_path: Path) -> None:
    check(_compose(*_overrides(group, name, tmp_path)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+model.widht=64"], r"model\.widht=64: unknown key; did you mean width\?"),
        (["+sead=1"], r"sead=1: unknown key; did you mean seed\?"),
        (["model.width=wide"], r"model\.width=wide: wrong type str; must be int"),
        (["model.width=null"], r"model\.width=None: wrong type NoneType; must be int"),
        (["model.activation_checkpointing=1"], r"model\.activation_checkpointing=1: wrong type int; must be str"),
        (["trainer.max_steps=many"], r"trainer\.max_steps=many: wrong type str"),
        (["trainer.precision=8"], r"trainer\.precision=8: must be one of auto, 32-true"),
        (
            ["model.width=${missing.value}"],
            r"model\.width=\$\{missing\.value\}: refers to a config value that does not",
        ),
        (["model.width=${no_such_resolver:1}"], r"model\.width=.*cannot be resolved"),
        (["model.width=???"], r"model\.width=\?\?\?: has no value"),
        (
            ["model._target_=samu_lm.model.Transformer"],
            r"model\._target_=samu_lm\.model\.Transformer: cannot be imported",
        ),
        (["+callbacks.mine=3"], r"callbacks\.mine=3: unknown key; callbacks holds named parts"),
        (["callbacks.progress.every_n_steps=often"], r"callbacks\.progress\.every_n_steps=often: wrong type"),
        (["+callbacks.progress.each=3"], r"callbacks\.progress\.each=3: unknown key"),
    ],
)
def test_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(_compose(*overrides))


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (True, float, False),
        ("1", float, False),
        (1, bool, False),
        ("a", str | None, True),
        (None, str | None, True),
        (None, str, False),
        (OmegaConf.create([1]), list[int], True),
        (OmegaConf.create({"a": 1}), list[int], False),
        (OmegaConf.create({"a": 1}), dict[str, int], True),
        ("a", Path, True),
        (3, Any, True),
    ],
)
def test_value_matches(value: Any, hint: Any, fits: bool) -> None:
    assert value_matches(value, hint) is fits


def test_a_config_error_survives_a_process_boundary() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError("data.path", "x", "no such file")))
    assert str(error) == "data.path=x: no such file"
    assert (error.key, error.value, error.remedy) == ("data.path", "x", "no such file")
