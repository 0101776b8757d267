"""The checkpoint file as training writes it and evaluation reads it: Lightning's, plus this package's own entry.

`checkpoint["samu_lm"]` holds the format's number, the run's composed and resolved config, and the tokenizer's state;
the model's weights are in `checkpoint["state_dict"]` under `model.`. All of it loads under `weights_only=True`.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from samu_lm.errors import ConfigError

FORMAT = 1
WEIGHT_PREFIX = "model."
_ZIP_MAGIC = b"PK\x03\x04"


def read_checkpoint(path: Path, key: str) -> dict[str, Any]:
    """Reads a checkpoint without running code from it; tensors stay on the disk until they are used.

    Args:
        path: the file.
        key: config key that gave it, for the errors.

    Raises:
        ConfigError: the file is absent, truncated, or not a checkpoint of this package and format.
    """
    _check_file(path, key)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(key, path, "holds more than plain values; give a checkpoint that train.py wrote") from error
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise ConfigError(key, path, f"cannot be read as a checkpoint ({reason}); give a complete file") from error
    own = content.get("samu_lm") if isinstance(content, dict) else None
    if not isinstance(own, dict) or not {"format", "config", "tokenizer"} <= own.keys():
        raise ConfigError(key, path, "is not a checkpoint that train.py wrote; give one that is")
    if own["format"] != FORMAT:
        raise ConfigError(key, path, f"has format {own['format']}; this version reads format {FORMAT}")
    return content


def _check_file(path: Path, key: str) -> None:
    """Refuses what cannot be a whole checkpoint, before anything is loaded."""
    if path.is_dir():
        inside = (path / "checkpoints" / "last.ckpt", path / "last.ckpt")
        example = next((file for file in inside if file.is_file()), inside[0])
        raise ConfigError(key, path, f"is a folder; give a file, such as {example}")
    if not path.is_file():
        raise ConfigError(key, path, "no such file; give a checkpoint, below a run's checkpoints/")
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP_MAGIC))
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read ({error.strerror}); give a checkpoint") from error
    if not start:
        raise ConfigError(key, path, "is empty; give a complete checkpoint")
    if not _ZIP_MAGIC.startswith(start):
        raise ConfigError(key, path, "is not a checkpoint; give a file that train.py wrote")
    if not zipfile.is_zipfile(path):
        raise ConfigError(key, path, "is truncated: its end is missing; copy it again or give an earlier one")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # reads every byte: a memory-mapped load would take damaged weights in silence
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ConfigError(key, path, f"is damaged ({error}); copy it again or give an earlier one") from error
    if damaged is not None:
        raise ConfigError(key, path, f"is damaged in {damaged}; copy it again or give an earlier one")
