"""The checkpoint as training writes it and evaluation reads it: Lightning's, plus this package's own entry.

`checkpoint["samu_lm"]` holds the format's number, the run's composed and resolved config, and the tokenizer's state;
the model's weights are in `checkpoint["state_dict"]` under `model.`. All of it loads under `weights_only=True`.

The same content may lie in a file, in a folder of shards (`sharded.py`) or, without what only training needs, in a
folder with safetensors (`exported.py`).
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samu_lm.errors import ConfigError

FORMAT = 1
WEIGHT_PREFIX = "model."
_ZIP_MAGIC = b"PK\x03\x04"
# What reading an archive with changed bytes raises: names and fields of its directory have no checksum of their own.
_DAMAGED_ARCHIVE = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error)


def read_checkpoint(path: Path, key: str, shapes_only: bool = False) -> dict[str, Any]:
    """Reads a checkpoint and verifies its checksums; tensors of a file stay on the disk until they are used.

    No code from a file or an exported folder is run. A folder of shards is PyTorch's own format, which is pickled:
    take one from a place that you trust.

    Args:
        path: the file or folder.
        key: config key that gave it, for the errors.
        shapes_only: of a folder of shards, give weights on the meta device and no optimizer states.

    Raises:
        ConfigError: the checkpoint is absent, truncated, damaged, or not one of this package and format.
    """
    from samu_lm.checkpoint import exported, sharded

    if exported.is_exported(path):
        content = exported.read(path, key)
    elif sharded.is_sharded(path):
        content = sharded.read(path, key, shapes_only)
    else:
        check_file(path, key)
        content = load_plain(path, key)
    return _own_format(content, path, key)


def read_step(path: Path, key: str) -> int:
    """The optimizer step of a checkpoint that training wrote, without reading its weights or verifying its checksums.

    Raises:
        ConfigError: as `read_checkpoint`, as far as that shows.
    """
    from samu_lm.checkpoint import sharded

    if sharded.is_sharded(path):
        content = load_plain(path / sharded.REST, key)
    else:
        _check_structure(path, key)
        content = load_plain(path, key)
    return int(_own_format(content, path, key)["global_step"])


def load_plain(path: Path, key: str) -> Any:
    """What `torch.save` wrote, read without running code from it; tensors stay on the disk until they are used.

    Raises:
        ConfigError: it cannot be read, or holds more than plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(key, path, "holds more than plain values; give a checkpoint that train.py wrote") from error
    except Exception as error:  # a damaged file can raise almost anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise ConfigError(key, path, f"cannot be read as a checkpoint ({reason}); give a complete file") from error


def _own_format(content: Any, path: Path, key: str) -> dict[str, Any]:
    own = content.get("samu_lm") if isinstance(content, dict) else None
    if not isinstance(own, dict) or not {"format", "config", "tokenizer"} <= own.keys():
        raise ConfigError(key, path, "is not a checkpoint that train.py wrote; give one that is")
    if own["format"] != FORMAT:
        raise ConfigError(key, path, f"has format {own['format']}; this version reads format {FORMAT}")
    return content


def _check_structure(path: Path, key: str) -> None:
    """Refuses what is no file of `torch.save` with a beginning and an end."""
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
    try:
        complete = zipfile.is_zipfile(path)
    except _DAMAGED_ARCHIVE as error:
        raise ConfigError(key, path, f"is damaged ({error}); copy it again or give an earlier one") from error
    if not complete:
        raise ConfigError(key, path, "is truncated: its end is missing; copy it again or give an earlier one")


def check_file(path: Path, key: str) -> None:
    """Refuses what cannot be a whole checkpoint, before anything is loaded."""
    _check_structure(path, key)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # reads every byte: a memory-mapped load would take damaged weights in silence
    except _DAMAGED_ARCHIVE as error:
        raise ConfigError(key, path, f"is damaged ({error}); copy it again or give an earlier one") from error
    if damaged is not None:
        raise ConfigError(key, path, f"is damaged in {damaged}; copy it again or give an earlier one")


def model_as_trained(model: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config's ``model``, with what was trained before a key existed: the stream between blocks in float32."""
    own = str(model.get("_target_")).startswith("samu_lm.")
    return ({"residual_in_float32": True} if own else {}) | dict(model)
