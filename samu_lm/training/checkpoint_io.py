"""Checkpoint files that are whole or absent: written beside their name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from samu_lm.checkpoint import load_plain, sharded
from samu_lm.errors import WriteError

PARTIAL_SUFFIX = ".partial"


class CheckpointWriteError(WriteError):
    """A checkpoint could not be written; the file that had its name before, if any, is as it was."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file or into a folder of the run: an error of the file system becomes one line.

    Raises:
        WriteError: names the path and the system's reason.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        reason = error.strerror or type(error).__name__
        raise WriteError(
            f"{path}: cannot be written ({reason}); checkpoints are as they were: free space, then resume=last"
        ) from error


@contextlib.contextmanager
def writing_checkpoint(path: Path) -> Iterator[None]:
    """Around the writing of a checkpoint: an error of the file system becomes one line that names the path.

    Raises:
        CheckpointWriteError: the folder cannot be written or the disk is full.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer reports a failed write as a RuntimeError
        if isinstance(error, CheckpointWriteError):
            raise
        reason = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        kept = "; the previous file is unchanged" if path.exists() else ""
        raise CheckpointWriteError(
            f"checkpoint={path}: cannot be written ({reason}){kept}; free space or choose another hydra.run.dir"
        ) from error


def partial_name(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written so that a crash at any moment leaves the previous file under its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint.

        Raises:
            CheckpointWriteError: the folder cannot be written or the disk is full.
        """
        path = Path(path)
        partial = partial_name(path)
        with writing_checkpoint(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
                sync_folder(path.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Reads a checkpoint, tensors mapped to the CPU; of a folder of shards, whole tensors.

        The checksums of a file were verified when it was chosen (`samu_lm.training.resume.find_checkpoint`).
        """
        path = Path(path)
        return sharded.read(path, "resume", False) if sharded.is_sharded(path) else load_plain(path, "resume")


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_as(path: Path, name: Path) -> None:
    """Gives a checkpoint a second name, under which it stays when the first is given to another.

    Raises:
        CheckpointWriteError: it cannot be made.
    """
    partial = partial_name(name)
    with writing_checkpoint(name):
        partial.unlink(missing_ok=True)
        if path.is_symlink():  # a folder of shards
            partial.symlink_to(os.readlink(path))
        else:
            try:
                os.link(path, partial)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, partial)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
        os.replace(partial, name)
        if partial.exists():  # both names were the same file already; a rename then does nothing
            partial.unlink()
        sync_folder(name.parent)


def shard_folders(folder: Path) -> set[Path]:
    """Folders of shards that no checkpoint's name in their folder leads to any more."""
    used = {path.resolve() for path in folder.glob("*.ckpt") if path.is_symlink()}
    return {path for path in folder.glob(".*.ckpt.*") if path.is_dir() and path.resolve() not in used}


def remove_partial_files(folder: Path) -> list[Path]:
    """Deletes what an earlier crash left half-written in a folder of checkpoints; returns the deleted paths."""
    leftovers = sorted({*folder.glob(f".*.ckpt{PARTIAL_SUFFIX}"), *shard_folders(folder)})
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers
