"""Arguments that several benchmarks have, checked before anything is measured."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from samu_lm.errors import ConfigError
from samu_lm.model.fp8 import RECIPES


def check_positive(**values: int | Iterable[int]) -> None:
    """Refuses numbers below 1; a name is the argument's, with ``_`` for ``-``.

    Raises:
        ConfigError: one is; names the argument and the value.
    """
    for name, given in values.items():
        for value in (given,) if isinstance(given, int) else given:
            if value < 1:
                raise ConfigError("--" + name.replace("_", "-"), value, "must be at least 1")


def add_fp8(parser: argparse.ArgumentParser) -> None:
    """Declares ``--fp8``."""
    parser.add_argument(
        "--fp8", choices=RECIPES, default="none", help="linear maps of the blocks in float8, as the key fp8 of train.py"
    )


def check_output(path: Path) -> None:
    """Makes the folder of a result and refuses a place that cannot be written, before hours are spent on it.

    Raises:
        ConfigError: ``--output`` is a folder, or cannot be written.
    """
    if path.is_dir():
        raise ConfigError("--output", path, "is a folder; give a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("a"):
                pass
    except OSError as error:
        raise ConfigError("--output", path, f"cannot be written ({error.strerror}); give another file") from error
