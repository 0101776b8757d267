"""Reading a run's checkpoint back: the file alone gives weights, tokenizer and the config it was trained with."""

from __future__ import annotations

import difflib
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samu_lm.errors import ConfigError

FORMAT = 1
WEIGHT_PREFIX = "model."
# Chosen anew wherever the model runs; no weight depends on them.
RUNTIME_MODEL_KEYS = frozenset({"backend"})
_ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds that evaluation needs.

    Attributes:
        path: absolute path of the file.
        step: optimizer steps taken when it was written.
        epoch: epoch it was written in, from 0.
        config: the run's composed and resolved config, as plain dicts and lists.
        tokenizer: the tokenizer's `state_dict()`.
        weights: parameter name (as in `RecurrentLM`) to tensor on the CPU; read from the file when first touched.
        lightning_version: version of Lightning that wrote the file.
    """

    path: Path
    step: int
    epoch: int
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    weights: dict[str, Tensor]
    lightning_version: str


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a checkpoint without running any code from it (`weights_only`) and without loading the optimizer's tensors.

    Raises:
        ConfigError: `checkpoint=PATH`: the file is missing, truncated, or not a checkpoint of this package and format.
    """
    path = Path(path).expanduser().absolute()
    _check_file(path)
    try:
        # Mapped, not read: the optimizer state, two thirds of the file, is never touched.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError("checkpoint", path, f"cannot be read as a checkpoint ({_short(reason)})") from error
    return _interpret(path, content)


def _check_file(path: Path) -> None:
    if path.is_dir():
        inside = [path / "checkpoints" / "last.ckpt", path / "last.ckpt"]
        found = next((file for file in inside if file.is_file()), None)
        remedy = f"is a folder; give the file, here {found}" if found else "is a folder; give a checkpoint file"
        raise ConfigError("checkpoint", path, remedy)
    if not path.is_file():
        raise ConfigError("checkpoint", path, "no such file; give a run's checkpoints/last.ckpt or best checkpoint")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
    except OSError as error:
        raise ConfigError("checkpoint", path, f"cannot be read: {error.strerror}") from error
    if not magic:
        raise ConfigError("checkpoint", path, "is empty; give a complete checkpoint")
    if magic != _ZIP_MAGIC:
        raise ConfigError("checkpoint", path, "is not a checkpoint; give a file that train.py saved")
    if not zipfile.is_zipfile(path):
        raise ConfigError("checkpoint", path, "is truncated, its end is missing; copy it again or give an earlier one")


def _interpret(path: Path, content: Any) -> Checkpoint:
    own = content.get("samu_lm") if isinstance(content, dict) else None
    if not isinstance(own, dict) or "format" not in own:
        raise ConfigError("checkpoint", path, "is not a samu_lm checkpoint; give a file that train.py saved")
    if own["format"] != FORMAT:
        remedy = f"has format {own['format']}, this version reads format {FORMAT}; use the version that wrote it"
        raise ConfigError("checkpoint", path, remedy)
    parts = {"config": own.get("config"), "tokenizer": own.get("tokenizer"), "state_dict": content.get("state_dict")}
    for name, part in parts.items():
        if not isinstance(part, dict) or not part:
            raise ConfigError("checkpoint", path, f"holds no {name}; give a file that train.py saved")
    foreign = [key for key in parts["state_dict"] if not key.startswith(WEIGHT_PREFIX)]
    if foreign:
        remedy = f"holds weights that are not the model's: {_some(foreign)}; give a file that train.py saved"
        raise ConfigError("checkpoint", path, remedy)
    return Checkpoint(
        path=path,
        step=int(content.get("global_step", 0)),
        epoch=int(content.get("epoch", 0)),
        config=parts["config"],
        tokenizer=parts["tokenizer"],
        weights={key.removeprefix(WEIGHT_PREFIX): tensor for key, tensor in parts["state_dict"].items()},
        lightning_version=str(content.get("pytorch-lightning_version", "unknown")),
    )


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Copies the checkpoint's weights into a model; every name and shape must match.

    Raises:
        ConfigError: `checkpoint=PATH`: a weight is missing, left over, or of another shape.
    """
    own = model.state_dict()
    misfits = {name for name, weight in checkpoint.weights.items() if name in own and weight.shape != own[name].shape}
    problems = [
        f"{what}: {_some(sorted(names))}"
        for what, names in (
            ("missing weights", own.keys() - checkpoint.weights.keys()),
            ("weights the model does not have", checkpoint.weights.keys() - own.keys()),
            ("weights of another shape", misfits),
        )
        if names
    ]
    if problems:
        remedy = f"does not fit its own config ({'; '.join(problems)}); give a complete checkpoint"
        raise ConfigError("checkpoint", checkpoint.path, remedy)
    model.load_state_dict(checkpoint.weights, strict=True)


def refuse_contradictions(group: str, overrides: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Compares what the user set under `group` with the checkpoint's config; equal values pass.

    Args:
        group: `model` or `tokenizer`, for the message.
        overrides: the user's keys, nested.
        trained: the checkpoint's keys, nested.

    Raises:
        ConfigError: `group.key=value`: the checkpoint has another value, which the message names, or no such key.
    """
    for key, value in overrides.items():
        name = f"{group}.{key}"
        if key in RUNTIME_MODEL_KEYS and group == "model":
            continue
        if key not in trained:
            raise ConfigError(name, value, f"the checkpoint has no such key; {_suggest(key, trained)}")
        if isinstance(value, Mapping) and isinstance(trained[key], Mapping):
            refuse_contradictions(name, value, trained[key])
        elif value != trained[key]:
            raise ConfigError(name, value, f"the checkpoint was trained with {name}={trained[key]}; drop the override")


def merge_known(group: str, trained: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's settings of a group with the user's on top; no key may be new.

    Raises:
        ConfigError: `group.key=value`: the checkpoint's settings have no such key.
    """
    merged = dict(trained)
    for key, value in overrides.items():
        if key not in trained:
            remedy = f"the checkpoint's {group} has no such key; {_suggest(key, trained)}"
            raise ConfigError(f"{group}.{key}", value, remedy)
        nested = isinstance(value, Mapping) and isinstance(trained[key], Mapping)
        merged[key] = merge_known(f"{group}.{key}", trained[key], value) if nested else value
    return merged


def _suggest(key: str, known: Mapping[str, Any]) -> str:
    names = [str(name) for name in known if not str(name).startswith("_")]
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _short(text: str, length: int = 160) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
