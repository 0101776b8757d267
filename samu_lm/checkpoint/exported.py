"""A checkpoint for use elsewhere: a folder with the weights as safetensors, the config and the tokenizer.

`model.safetensors` holds the weights under the model's own names, each once: the output layer is the embedding.
`config.json` holds the run's config, the step and the other files' SHA-256; `tokenizer_config.json` the tokenizer's
settings, and `tokenizer.json`, where there is one, its vocabulary in the format of the `tokenizers` package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samu_lm.errors import ConfigError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_KEPT = ("global_step", "epoch", "pytorch-lightning_version")


def is_exported(path: Path) -> bool:
    """Whether a path is an exported folder."""
    return (path / WEIGHTS).is_file() or (path / CONFIG).is_file()


def write(folder: Path, content: Mapping[str, Any]) -> list[Path]:
    """Writes a checkpoint's weights, config and tokenizer into a folder; returns the files' paths.

    Args:
        folder: an existing folder.
        content: as `read_checkpoint` gives it.
    """
    from safetensors.torch import save_file

    from samu_lm.checkpoint import WEIGHT_PREFIX

    weights = {k.removeprefix(WEIGHT_PREFIX): v.contiguous() for k, v in content["state_dict"].items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    own = content["samu_lm"]
    tokenizer = dict(own["tokenizer"])
    vocabulary = tokenizer.pop("json", None)
    description = {
        **{key: value for key, value in own.items() if key != "tokenizer"},
        **{key: content[key] for key in _KEPT if key in content},
    }
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer, indent=2) + "\n")
    written = [folder / WEIGHTS, folder / TOKENIZER_CONFIG]
    if vocabulary is not None:
        (folder / TOKENIZER).write_text(vocabulary)
        written.append(folder / TOKENIZER)
    description["sha256"] = {path.name: _sha256(path) for path in written}
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    return [*written, folder / CONFIG]


def read(folder: Path, key: str) -> dict[str, Any]:
    """An exported folder as the content of a checkpoint file, without optimizer and place in the data.

    Args:
        folder: the folder.
        key: config key that gave it, for the errors.

    Raises:
        ConfigError: a file is missing, damaged, or of another format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from samu_lm.checkpoint import WEIGHT_PREFIX

    for name in (WEIGHTS, CONFIG, TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            raise ConfigError(key, folder, f"is incomplete: it lacks {name}; export the checkpoint again")
    try:
        description, tokenizer = (json.loads((folder / name).read_text()) for name in (CONFIG, TOKENIZER_CONFIG))
        if (folder / TOKENIZER).is_file():
            tokenizer["json"] = (folder / TOKENIZER).read_text()
        for name, digest in description["sha256"].items():
            if not (folder / name).is_file():
                raise ConfigError(key, folder, f"is incomplete: it lacks {name}; export the checkpoint again")
            if _sha256(folder / name) != digest:
                raise ConfigError(key, folder, f"is damaged in {name}; copy it again")
        weights = load_file(folder / WEIGHTS)
        own = {name: value for name, value in description.items() if name not in (*_KEPT, "sha256")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ConfigError(key, folder, f"cannot be read as an exported model ({reason}); export it again") from error
    return {
        "state_dict": {WEIGHT_PREFIX + name: tensor for name, tensor in weights.items()},
        "samu_lm": own | {"tokenizer": tokenizer},
        **{name: description[name] for name in _KEPT if name in description},
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
