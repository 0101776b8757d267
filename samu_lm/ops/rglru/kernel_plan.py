"""What shape each RG-LRU kernel runs in: tiles, segments and compiler options, as functions of sizes alone.

Legend: B rows, L tokens, W width, H gate blocks of w = W/H channels; the tile's letters as in kernel_forward.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from samu_lm.ops.backend import interpreting
from samu_lm.ops.common.launch import cdiv, next_power_of_two

# Channels per program where the logits come from memory.
LOGITS_CHANNELS = 64
# Widest gate block that the fused path takes, by activation type. Full float32 products do not run on the tensor cores
# and a tile of them does not fit the registers, so wider float32 blocks are projected first, by the BLAS.
WIDEST_BLOCK = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 32}


def fits(width_per_block: int, dtype: torch.dtype) -> bool:
    """Whether the fused path takes gate blocks of this many channels for activations of this type."""
    return dtype in WIDEST_BLOCK and 1 <= width_per_block <= WIDEST_BLOCK[dtype]


@dataclass(frozen=True)
class Options:
    """How one kernel is compiled and spread; found by measurement (docs/kernels-rglru.md).

    Attributes:
        resident: programs that a multiprocessor is planned to hold; a row is cut into segments accordingly.
        stages: depth of the loads' pipeline.
        pick: take x out of the tensor cores (a product with a 0/1 matrix) rather than out of shared memory.
        registers: most registers a thread may use, None for the compiler's choice.
    """

    resident: int = 2
    stages: int = 3
    pick: bool = True
    registers: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        limit = {} if self.registers is None or interpreting() else {"maxnreg": self.registers}
        return {"STAGES": self.stages, "PICK": self.pick} | limit


OPTIONS = {
    "forward_summary": Options(resident=3),
    "forward": Options(resident=3),
    "summary": Options(resident=2),
    "gradient": Options(resident=2),
    "projection": Options(resident=1),
}


# Tokens of a tile: more would keep more numbers per thread than it has registers.
TILE_TOKENS = {"mixer": 32, "logits": 64}
# Widest gate block whose weight gradients a program keeps in registers while it walks its segment.
FUSED_CHANNELS = {"gradient": 64}


@dataclass(frozen=True)
class Tiling:
    """Shape of one program's tile; the names are the kernels' constants (legend in kernel_forward.py)."""

    w: int
    slices: int
    M: int
    T: int
    Q: int
    E: int
    K1: int
    K2: int
    warps: int

    def constants(self) -> dict[str, int]:
        """The kernels' compile-time arguments."""
        names = ("w", "slices", "M", "T", "Q", "E", "K1", "K2")
        return {name: getattr(self, name) for name in names} | {"num_warps": self.warps}


@lru_cache
def mixer_tiling(w: int) -> Tiling:
    """Tile for gate blocks of w channels: the whole block up to 64 channels, slices of 64 beyond."""
    whole = max(16, next_power_of_two(w))
    m, k1 = min(whole, 64), min(whole, 128)
    k2 = 0 if w <= k1 else max(16, next_power_of_two(w - k1))
    return Tiling(w, cdiv(w, m), m, TILE_TOKENS["mixer"], 4 * (64 // m), 2, k1, k2, 4)


@lru_cache
def logits_tiling() -> Tiling:
    """Tile where the logits come from memory: loads put rows of tokens across 16 groups of threads."""
    return Tiling(LOGITS_CHANNELS, 1, LOGITS_CHANNELS, TILE_TOKENS["logits"], 16, 1, 16, 0, 4)


@lru_cache
def projection_tile(w: int) -> dict[str, int]:
    """Tile of ``projection_kernel``: at most 64 input channels a program; two stages where three do not fit."""
    n = max(16, next_power_of_two(w))
    m = min(n, 64)
    return {"pieces": cdiv(w, m), "M": m, "N": n, "T": 64, "STAGES": 3 if n <= 128 else 2}


@lru_cache
def multiprocessors(index: int | None) -> int:
    """Multiprocessors of a CUDA device; a small number where kernels are interpreted, so that rows still split."""
    if index is None or not torch.cuda.is_available():
        return 4 if interpreting() else 132
    return torch.cuda.get_device_properties(index).multi_processor_count


@dataclass(frozen=True)
class Split:
    """How a row's tiles fall into segments, one program each per row and channel block."""

    tiles: int
    tiles_per_segment: int
    segments: int


def split_row(length: int, tile_tokens: int, columns: int, programs: int) -> Split:
    """Segments such that ``columns`` channel blocks (of all rows) times segments come close to ``programs``."""
    tiles = cdiv(length, tile_tokens)
    per_segment = cdiv(tiles, max(1, min(tiles, programs // max(1, columns))))
    return Split(tiles, per_segment, cdiv(tiles, per_segment))
