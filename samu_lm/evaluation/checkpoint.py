"""Reading a run's checkpoint back: the file alone gives weights, tokenizer and the config it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samu_lm.checkpoint import WEIGHT_PREFIX, read_checkpoint
from samu_lm.config import nearest
from samu_lm.errors import ConfigError

# Chosen anew wherever the model runs; no weight depends on them.
RUNTIME_MODEL_KEYS = frozenset({"backend"})


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
    return _interpret(path, read_checkpoint(path, key="checkpoint"))


def _interpret(path: Path, content: dict[str, Any]) -> Checkpoint:
    own = content["samu_lm"]
    parts = {"config": own["config"], "tokenizer": own["tokenizer"], "state_dict": content.get("state_dict")}
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
    """Gives a model on the meta device memory on the CPU and the checkpoint's weights; every name and shape must match.

    Raises:
        ConfigError: `checkpoint=PATH`: a weight is missing, left over, or of another shape.
    """
    own = model.state_dict()
    if unsaved := {name for name, _ in model.named_buffers()} - own.keys():
        raise ValueError(
            f"model={type(model).__name__}: buffers {sorted(unsaved)} are in no checkpoint; make them persistent"
        )
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
    model.to_empty(device="cpu")
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
            raise ConfigError(name, value, f"the checkpoint has no such key; {nearest(key, trained)}")
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
            remedy = f"the checkpoint's {group} has no such key; {nearest(key, trained)}"
            raise ConfigError(f"{group}.{key}", value, remedy)
        nested = isinstance(value, Mapping) and isinstance(trained[key], Mapping)
        merged[key] = merge_known(f"{group}.{key}", trained[key], value) if nested else value
    return merged


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
