"""Checkpoint files that are whole or absent: written beside their name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from samu_lm.errors import SamuLMError

PARTIAL_SUFFIX = ".partial"


class CheckpointWriteError(SamuLMError, OSError):
    """A checkpoint could not be written; the file that had its name before, if any, is as it was."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written so that a crash at any moment leaves the previous file under its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint.

        Raises:
            CheckpointWriteError: the folder cannot be written or the disk is full.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:  # torch's writer reports a failed write as a RuntimeError
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
            kept = "; the previous file is unchanged" if path.exists() else ""
            raise CheckpointWriteError(
                f"checkpoint={path}: cannot be written ({reason}){kept}; free space or choose another hydra.run.dir"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Reads a checkpoint without running any code from it, tensors mapped to the CPU."""
        return torch.load(path, map_location="cpu", weights_only=True)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial_files(folder: Path) -> list[Path]:
    """Deletes what an earlier crash left half-written in a folder of checkpoints; returns the deleted paths."""
    leftovers = sorted(folder.glob(f".*.ckpt{PARTIAL_SUFFIX}"))
    for path in leftovers:
        path.unlink()
    return leftovers
