"""Shapes on the command line, and the shapes of the recorded tables."""

from __future__ import annotations

import torch

from samu_lm.errors import ConfigError

Shape = tuple[int, int, int]

# (B, L, W) of the recorded mixer tables.
TABLE: tuple[Shape, ...] = (
    (1, 8192, 1024),
    (1, 32768, 1024),
    (1, 65536, 1024),
    (1, 131072, 1024),
    (4, 2048, 2048),
    (1, 8192, 2560),
    (1, 32768, 2048),
)
# Those, and the widths of the recorded calibration.
CALIBRATED: tuple[Shape, ...] = (*TABLE, (1, 8192, 1536), (1, 8192, 2048))


def parse_shapes(texts: list[str] | None, default: tuple[Shape, ...] = TABLE, key: str = "--shapes") -> list[Shape]:
    """Shapes written as ``B,L,W``.

    Raises:
        ConfigError: a shape is not three positive numbers, or its width is odd.
    """
    if not texts:
        return list(default)
    shapes = []
    for text in texts:
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(key, text, "write B,L,W, three positive numbers, e.g. 1,32768,1024")
        batch, length, width = map(int, parts)
        if width % 2:
            raise ConfigError(key, text, "the width must be even: channels are read as complex numbers")
        shapes.append((batch, length, width))
    return shapes


def require_gpu() -> None:
    """Refuses to measure without a GPU.

    Raises:
        ConfigError: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device", "cpu", "kernels are measured on a CUDA GPU; run this on a machine that has one")
