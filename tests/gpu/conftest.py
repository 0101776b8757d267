"""Fixtures of tests that need a GPU."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def large_memory() -> Iterator[None]:
    """One such test at a time, however many processes test on one GPU: each takes tens of GiB."""
    torch.cuda.empty_cache()
    with (Path(tempfile.gettempdir()) / f"samu_lm_gpu_tests_{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
