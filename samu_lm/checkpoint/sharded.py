"""A checkpoint in shards: a folder that the ranks of a sharded run write together (`torch.distributed.checkpoint`).

The folder holds PyTorch's shards of weights and optimizer states, in `meta.pt` everything else, and in
`checksums.json` the size and CRC32 of each file. It does not depend on the number of ranks that wrote it.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from samu_lm.errors import ConfigError

SHARD_INDEX, REST, CHECKSUMS = ".metadata", "meta.pt", "checksums.json"
_READ_BYTES = 2**24


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder of shards."""
    return (path / SHARD_INDEX).is_file() or (path / CHECKSUMS).is_file()


def checksum(path: Path) -> list[int]:
    """Size in bytes and CRC32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return [size, crc]


def write_checksums(folder: Path, sums: Mapping[str, list[int]]) -> Path:
    """Writes the checksums of a folder's files; returns the file's path."""
    path = folder / CHECKSUMS
    path.write_text(json.dumps(dict(sorted(sums.items())), indent=0) + "\n")
    return path


def verify(path: Path, key: str) -> None:
    """Compares every file of a folder of shards with its checksum.

    Raises:
        ConfigError: names the first file that is missing or damaged.
    """
    try:
        sums: dict[str, list[int]] = json.loads((path / CHECKSUMS).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"has no readable {CHECKSUMS}; copy it again or give an earlier one") from error
    for name in (SHARD_INDEX, REST, *sums):
        if name not in sums or not (path / name).is_file():
            raise ConfigError(key, path, f"is incomplete: it lacks {name}; copy it again or give an earlier one")
    for name, expected in sums.items():
        if checksum(path / name) != expected:
            raise ConfigError(key, path, f"is damaged in {name}; copy it again or give an earlier one")


def read(path: Path, key: str, shapes_only: bool) -> dict[str, Any]:
    """A folder of shards as the content of a checkpoint file, whole tensors on the CPU.

    Args:
        path: the folder.
        key: config key that gave it, for the errors.
        shapes_only: give weights on the meta device and no optimizer states.

    Raises:
        ConfigError: the folder is incomplete or damaged.
    """
    from samu_lm.checkpoint import load_plain

    verify(path, key)
    content: dict[str, Any] = load_plain(path / REST, key)
    try:
        if shapes_only:
            return content | {"state_dict": _weight_shapes(path)}
        whole = _read_whole(path)
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise ConfigError(key, path, f"cannot be read as a checkpoint ({reason}); give a complete folder") from error
    states = [whole[name] for name in sorted(whole, key=_number) if name.startswith("optimizer_")]
    return content | {"state_dict": whole["state_dict"], "optimizer_states": [by_number(state) for state in states]}


def _number(name: str) -> int:
    return int(name.rpartition("_")[2]) if name.startswith("optimizer_") else -1


def _read_whole(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    whole: dict[str, Any] = {}
    _load_state_dict(whole, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return whole


def _weight_shapes(path: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = "state_dict."
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in found.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters numbered in the groups' order, as `Optimizer.state_dict` gives it, from one
    with parameters by name, as `torch.distributed.checkpoint` stores it."""
    names: Iterable[str] = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The opposite of `by_number`.

    Args:
        state: as `Optimizer.state_dict` gives it.
        names: the parameters' names in the order of the optimizer's groups.
    """
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[index]: value for index, value in state["state"].items()}, "param_groups": groups}
