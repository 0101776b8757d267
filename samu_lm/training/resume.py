"""Finding the checkpoint that a run goes on from, and the config that it goes on with.

A resumed run takes the checkpoint's config. What the command line sets on top of it holds where it may change (length
of the run, batch size, devices, optimizer, loggers ...) and is refused where it would contradict what the checkpoint's
weights or its place in the data mean.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from samu_lm.checkpoint import model_as_trained, read_checkpoint, read_step
from samu_lm.config import config_dir, signature_of
from samu_lm.data.files import launch_path
from samu_lm.errors import ConfigError

# Groups and keys that give the weights or the place in the data their meaning ...
FIXED = ("model", "tokenizer", "data", "seed")
# ... and keys within them that may change all the same.
FREE = (
    "model.backend",
    "model.activation_checkpointing",
    "data.batch_size",
    "data.num_workers",
    "data.cache_dir",
    "data.path",
    "data.sources.*.path",
    "data.sources.*.cache_dir",
)


def find_checkpoint(resume: str, run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that ``resume`` names, and its content.

    Args:
        resume: a path, relative to the launch folder, or ``last``: that of the run folder's checkpoints which has the
            highest step.
        run_dir: the run's folder.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    folder = run_dir / "checkpoints"
    if resume == "last":
        path = find_last(folder)
        if path is None:
            remedy = f"no checkpoint in {folder}; set hydra.run.dir to the folder of the run to go on with"
            raise ConfigError("resume", resume, remedy)
    else:
        path = launch_path(resume)
    content = read_checkpoint(path, "resume", shapes_only=True)
    if "loops" not in content:
        raise ConfigError("resume", path, "holds weights without the optimizer's state; give a checkpoint of train.py")
    further = find_last(folder)
    if further is not None and (reached := read_step(further, "resume")) > int(content["global_step"]):
        remedy = f"{further} has gone on to step {reached}; choose another hydra.run.dir, or delete what lies beyond"
        raise ConfigError("resume", path, remedy)
    return path, content


def find_last(folder: Path) -> Path | None:
    """The checkpoint of a folder with the highest step, ``last.ckpt`` where several have it; None where there is none.

    Raises:
        ConfigError: a checkpoint there cannot be read.
    """
    found = [(read_step(path, "resume"), path.name == "last.ckpt", path) for path in sorted(folder.glob("*.ckpt"))]
    return max(found)[2] if found else None


def merge_config(
    composed: Mapping[str, Any], saved: Mapping[str, Any], overrides: Sequence[str] | None
) -> dict[str, Any]:
    """The config to go on with.

    Args:
        composed: today's composed and resolved config.
        saved: the checkpoint's.
        overrides: the command line's overrides; None takes every key of ``composed`` as set by the user.

    Returns:
        The checkpoint's config with what the user set on top.

    Raises:
        ConfigError: an override contradicts the checkpoint; names both values.
    """
    saved = dict(saved)
    if str(saved["data"].get("_target_")).startswith("samu_lm."):
        saved["data"] = {"packing": "concat"} | saved["data"]  # what checkpoints without the key were trained with
    keys = list(_keys_set(overrides, composed))
    trained = model_as_trained(saved["model"])
    for key in trained.keys() - saved["model"].keys():
        if f"model.{key}" not in keys:  # a preset's value came after the checkpoint and is not meant to change it
            composed = {**composed, "model": {**composed["model"], key: trained[key]}}
    saved["model"] = trained
    merged = copy.deepcopy(dict(composed))
    merged.update(copy.deepcopy(dict(saved)))
    for key in keys:
        ours, theirs = _lookup(composed, key), _lookup(saved, key)
        if key.split(".")[0] in FIXED:
            _refuse_contradiction(key, ours, theirs)
        _assign(merged, key, ours)
    return merged


def without_foreign_paths(cfg: DictConfig) -> DictConfig:
    """A composed config without places of data that are meant for the checkpoint's ``data``, not the composed one."""
    if not isinstance(cfg.get("data"), DictConfig) or not isinstance(cfg.data.get("_target_"), str):
        return cfg
    parameters, _ = signature_of(get_object(cfg.data["_target_"]))
    foreign = {"path", "cache_dir", "sources"} - set(parameters)
    cfg = cfg.copy()
    with open_dict(cfg):
        for name in foreign:
            cfg.data.pop(name, None)
    return cfg


def _keys_set(overrides: Sequence[str] | None, composed: Mapping[str, Any]) -> Iterator[str]:
    """Keys (or whole groups) that the command line sets, in its order."""
    if overrides is None:
        yield from composed
        return
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group.replace("/", ".")
        if key.split(".")[0] == "hydra":
            continue
        if key == "experiment":
            yield from _keys_of_experiment(override.value(), composed)
        else:
            yield key


def _keys_of_experiment(name: Any, composed: Mapping[str, Any]) -> Iterable[str]:
    """Keys that an experiment file sets: its own and the groups in its defaults."""
    if name is None:
        return ()
    file = config_dir() / "experiment" / f"{name}.yaml"
    if not file.is_file():  # from another config folder: everything may be its doing
        return tuple(composed)
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(content, dict)
    groups = [
        str(group).removeprefix("override").strip().strip("/").replace("/", ".")
        for entry in content.pop("defaults", [])
        if isinstance(entry, dict)
        for group in entry
    ]
    return (*groups, *(key for key, _ in _leaves({str(name): value for name, value in content.items()})))


def _leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        full = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, full)
        else:
            yield full, value


_ABSENT = object()


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _assign(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = config
    for part in parents:
        child = node.get(part)
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    if value is _ABSENT:  # deleted on the command line
        node.pop(last, None)
    else:
        node[last] = copy.deepcopy(value)


def _refuse_contradiction(key: str, ours: Any, theirs: Any) -> None:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for part in (*ours, *(p for p in theirs if p not in ours)):
            _refuse_contradiction(f"{key}.{part}", ours.get(part, _ABSENT), theirs.get(part, _ABSENT))
    elif ours != theirs and not any(fnmatch.fnmatchcase(key, free) for free in FREE):
        spelled = "no such key" if theirs is _ABSENT else f"{key}={theirs}"
        remedy = f"the checkpoint has {spelled}; drop the override, or start a new run without resume"
        raise ConfigError(key, "(nothing)" if ours is _ABSENT else ours, remedy)


def check_weights(path: Path, checkpoint: Mapping[str, Any], model: nn.Module) -> None:
    """Compares names and shapes of a checkpoint's weights with a model's (which may be on the meta device).

    Raises:
        ConfigError: they differ; names the first weight that does.
    """
    weights: Mapping[str, torch.Tensor] = checkpoint["state_dict"]
    expected = {f"model.{name}": tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(weights.keys() ^ expected.keys()):
        which = "lacks" if name in expected else "has an extra"
        raise ConfigError(
            "resume", path, f"is of another model: it {which} weight {name}; give a checkpoint of this one"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            found = f"{name} is {tuple(weights[name].shape)}, not {tuple(shape)}"
            raise ConfigError("resume", path, f"is of another model: {found}; give a checkpoint of this one")
