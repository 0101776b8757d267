"""Model and data of a checkpoint, from the settings that it holds and what the user put on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from samu_lm.checkpoint import model_as_trained
from samu_lm.config import check_config
from samu_lm.data import LMDataModule, Tokenizer
from samu_lm.errors import ConfigError
from samu_lm.evaluation.checkpoint import Checkpoint, load_weights, merge_known, refuse_contradictions
from samu_lm.evaluation.report import compact
from samu_lm.model import RecurrentLM

# How rows are cut: the checkpoint's settings hold for other data too.
ROW_KEYS = ("seq_len", "batch_size")


def build_model(checkpoint: Checkpoint, tokenizer: Tokenizer, overrides: Mapping[str, Any]) -> RecurrentLM:
    """The trained model, on the CPU, in float32 and in evaluation mode.

    Args:
        checkpoint: gives the model's settings and weights.
        tokenizer: the checkpoint's; its vocabulary is the model's where the settings leave that open.
        overrides: what the user set under `model.`.

    Raises:
        ConfigError: an override contradicts the checkpoint, or the checkpoint does not make a model.
    """
    config = _with_vocabulary(model_as_trained(_section(checkpoint, "model")), tokenizer)
    refuse_contradictions("model", _with_vocabulary(overrides, tokenizer), config)
    _refuse_foreign_code(checkpoint, "model", config, confirmed=overrides.get("_target_"))
    config |= {"backend": overrides["backend"]} if "backend" in overrides else {}
    try:
        with torch.device("meta"):  # no memory is taken before names and shapes are known to fit
            model = instantiate(config)
    except (InstantiationException, ValueError, TypeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError("checkpoint", checkpoint.path, f"this version cannot build its model ({reason})") from error
    load_weights(model, checkpoint)
    return model.eval()


def build_data(checkpoint: Checkpoint, tokenizer: Tokenizer, overrides: Mapping[str, Any]) -> LMDataModule:
    """The data to evaluate on, checked but not read.

    Args:
        checkpoint: gives the settings where the user chose no other group, and otherwise how rows are cut.
        tokenizer: the checkpoint's.
        overrides: what the user set under `data.`: a whole group, with its `_target_`, or single keys.

    Raises:
        ConfigError: a key is unknown, its value wrong, or there is no such data.
    """
    trained, target = _section(checkpoint, "data"), overrides.get("_target_")
    if str(trained["_target_"]).startswith("samu_lm."):
        trained = {"packing": "concat"} | trained  # what checkpoints without the key were trained with
    given = {key: value for key, value in overrides.items() if key not in ROW_KEYS or value is not None}
    if target in (None, trained["_target_"]):
        config = merge_known("data", trained, given)
        _refuse_foreign_code(checkpoint, "data", config, confirmed=target)
    else:
        config = {key: trained[key] for key in ROW_KEYS if key in trained} | given
    check_config(OmegaConf.create({"data": config}), {"data": None})
    data = instantiate(config, tokenizer=tokenizer)
    data.check()
    return data


def describe_model(model: RecurrentLM) -> str:
    """Mixer, depth, width and size in a few words."""
    size = compact(model.num_parameters())
    return f"{model.mixer}, {model.depth} blocks of width {model.width}, {size} parameters"


def describe_data(data: LMDataModule, split: str) -> str:
    """Corpus and split in a few words."""
    key, value = data.source.name()
    words = {"val": "held-out split", "train": "training split"}[split]
    return f"{words} of {value}" if key == "data" else f"{words} of {key}={value}"


def refuse_tokenizer_contradictions(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError where the user set a key of the tokenizer to another value than the checkpoint's."""
    chosen_by_shards = overrides.get("_target_") == "samu_lm.data.shard_tokenizer"  # which are checked against it
    if overrides and not chosen_by_shards:
        refuse_contradictions("tokenizer", overrides, _section(checkpoint, "tokenizer"))


def _section(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    section = checkpoint.config.get(name)
    if not isinstance(section, dict) or "_target_" not in section:
        raise ConfigError("checkpoint", checkpoint.path, f"its config holds no {name}; give a file that train.py saved")
    return dict(section)


def _with_vocabulary(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Null stands for the tokenizer's vocabulary."""
    filled = dict(config)
    if "vocab_size" in filled and filled["vocab_size"] is None:
        filled["vocab_size"] = tokenizer.vocab_size
    return filled


def _refuse_foreign_code(checkpoint: Checkpoint, group: str, config: Any, confirmed: str | None) -> None:
    """A checkpoint may come from anywhere: without the user's word its config calls nothing outside this package."""
    for target in _targets(config):
        inside = target.startswith("samu_lm.")
        if inside and str(getattr(get_object(target), "__module__", "")).startswith("samu_lm."):
            continue
        if target != confirmed:
            remedy = (
                f"its {group} is code outside samu_lm ({target}); if you trust it, repeat {group}._target_={target}"
            )
            raise ConfigError("checkpoint", checkpoint.path, remedy)


def _targets(config: Any) -> list[str]:
    if isinstance(config, Mapping):
        own = [str(config["_target_"])] if "_target_" in config else []
        return own + [target for value in config.values() for target in _targets(value)]
    if isinstance(config, list):
        return [target for value in config for target in _targets(value)]
    return []
