"""Calls of train.py as from a shell, in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import train
from samu_lm.config import config_dir
from samu_lm.entry import launch


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Hydra configures the root logger for its jobs; afterwards it is as before."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.setLevel(level)
        root.handlers[:] = handlers


def train_py(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs ``python train.py ARGUMENTS`` and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config-path={config_dir()}", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with _root_logger_kept():
        try:
            launch(train.main)
        except SystemExit as end:
            return int(end.code or 0)
    return 0
