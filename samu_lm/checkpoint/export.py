"""`samu-lm export`: a checkpoint as safetensors with config and tokenizer, or back as one checkpoint file."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from pathlib import Path

from samu_lm.errors import ConfigError

_KEYS = ("checkpoint", "out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.epilog = "example: samu-lm export checkpoint=runs/mine/checkpoints/best.ckpt out=exported/mine"
    parser.add_argument(
        "settings",
        nargs="+",
        metavar="KEY=VALUE",
        help="checkpoint=PATH: what to export (a file, a folder of shards, or an exported folder); out=PATH: a new "
        "folder for safetensors, config and tokenizer, or a new file ending in .ckpt for all of it in one checkpoint",
    )


def run(args: argparse.Namespace) -> int:
    """Exports a checkpoint and says what was written."""
    given = _settings(args.settings)
    source, out = Path(given["checkpoint"]).expanduser(), Path(given["out"]).expanduser()
    for path in export(source, out):
        print(path)
    return 0


def _settings(words: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals:
            raise ConfigError(
                key, value or "(nothing)", f"unknown key; give {' and '.join(f'{k}=PATH' for k in _KEYS)}"
            )
        given[key] = value
    for key in _KEYS:
        if not given.get(key):
            raise ConfigError(key, given.get(key, "(nothing)"), f"is missing; give {key}=PATH")
    return given


def export(source: Path, out: Path) -> list[Path]:
    """Writes a checkpoint in the other form; the result is whole or absent.

    Args:
        source: a checkpoint file, a folder of shards, or an exported folder.
        out: a folder for safetensors, config and tokenizer, or a file ending in ``.ckpt``. It must not exist.

    Returns:
        The paths of the files written.

    Raises:
        ConfigError: `checkpoint` cannot be read, or `out` exists or cannot be written.
    """
    from safetensors import SafetensorError

    from samu_lm.checkpoint import exported, read_checkpoint

    if out.exists():
        raise ConfigError("out", out, "exists; give a new path")
    content = read_checkpoint(source, "checkpoint")
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".ckpt":
            import torch

            with partial.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, out)
            return [out]
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir()
        names = [path.name for path in exported.write(partial, content)]
        for name in names:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, out)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise ConfigError("out", out, f"cannot be written ({reason}); free space or give another path") from error
    return [out / name for name in names]
