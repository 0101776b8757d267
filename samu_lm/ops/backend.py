"""Which implementation an op runs on: ``reference`` (plain PyTorch) or ``triton``.

``auto`` takes the Triton kernels for CUDA tensors and the reference elsewhere, and says once in the log what it took.
``triton`` on a machine that cannot run it is an error, never a silent fallback.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch
from torch import Tensor

BACKENDS = ("auto", "reference", "triton")
# Looked up once, here: torch.compile does not trace the import machinery, so a look-up per call would break graphs.
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_log = logging.getLogger(__name__)
_told: set[tuple[str, str]] = set()


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose_backend(op: str, backend: str, x: Tensor) -> str:
    """The backend that ``op`` runs on for the tensor ``x``.

    Raises:
        ValueError: ``backend`` is not one of ``auto``, ``reference``, ``triton``.
        RuntimeError: ``triton`` was asked for and cannot run: Triton is not installed, or ``x`` is not on a CUDA
            device and the interpreter is off.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return "reference"
    if backend == "triton":
        if not TRITON_INSTALLED:
            raise RuntimeError(
                f"backend='triton': {op} needs the package triton; install it or use backend='reference'"
            )
        if x.device.type != "cuda" and not interpreting():
            raise RuntimeError(
                f"backend='triton': {op} got a tensor on {x.device}; move it to a GPU or use backend='reference'"
            )
        return "triton"
    chosen = "triton" if TRITON_INSTALLED and x.device.type == "cuda" else "reference"
    if not torch.compiler.is_compiling() and (op, chosen) not in _told:
        _told.add((op, chosen))
        _log.info("%s runs on backend=%s for tensors on %s", op, chosen, x.device.type)
    return chosen
