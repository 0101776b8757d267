"""What shape each RG-LRU kernel runs in: tiles, segments and compiler options, as functions of sizes alone.

Legend: B rows, L tokens, W width, H gate blocks of w = W/H channels; the tile's letters as in kernel_forward.py.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from samu_lm.ops.backend import interpreting
from samu_lm.ops.common.launch import cdiv, next_power_of_two

OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Channels per program where the logits come from memory.
LOGITS_CHANNELS = 64
# Widest gate block that the fused path takes, by activation type. Full float32 products do not run on the tensor cores
# and a tile of them does not fit the registers, so wider float32 blocks are projected first, by the BLAS.
WIDEST_BLOCK = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 32}
# Tokens of a tile: more would keep more numbers per thread than it has registers.
TILE_TOKENS = {"mixer": 32, "logits": 32}
# Tiles of a piece, about: enough to pay for a program's start, few enough to spread the summaries evenly.
PIECE_TILES = {"all": 16}
# Widest gate block whose weight gradients a program keeps in registers while it walks its segment.
FUSED_CHANNELS = {"gradient": 64}


def fits(width_per_block: int, dtype: torch.dtype) -> bool:
    """Whether the fused path takes gate blocks of this many channels for activations of this type."""
    return dtype in WIDEST_BLOCK and 1 <= width_per_block <= WIDEST_BLOCK[dtype]


@dataclass(frozen=True)
class Options:
    """How one kernel is compiled and spread; found by measurement (docs/kernels-rglru.md).

    Attributes:
        resident: programs that a multiprocessor is planned to hold; a row is cut into segments accordingly.
        stages: depth of the loads' pipeline. Triton starts a load at the end of a step, so 2 hides little; but every
            stage costs registers.
        pick: take x out of the tensor cores (a product with a 0/1 matrix) rather than out of shared memory.
        registers: most registers a thread may use, None for the compiler's choice.
        warps: warps of a program.
        channels: most channels of a tile.
        paired: rows of the gates' product in such an order that a thread has both gates of a channel (kernel_tile.py);
            the gradient kernel then leaves the weights' gradients to ``projection_kernel``.
        run: channels of a slice that lie together in shared memory, where it is read from there (``pick`` not set).
    """

    resident: int = 2
    stages: int = 3
    pick: bool = True
    registers: int | None = None
    warps: int = 4
    channels: int = 64
    paired: bool = False
    run: int = 64

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        limit = {} if self.registers is None or interpreting() else {"maxnreg": self.registers}
        shape = {"STAGES": self.stages, "PICK": self.pick, "PAIRED": self.paired, "RUN": self.run}
        return shape | {"num_warps": self.warps} | limit


OPTIONS = {
    "forward_summary": Options(registers=168),
    "forward": Options(resident=4, registers=128, pick=False),
    "summary": Options(),
    "gradient": Options(resident=2, stages=2),
    "projection": Options(resident=1),
}
# For blocks of more than 64 channels: half as many numbers per thread, twice as many warps a multiprocessor.
_PAIRED = Options(resident=4, registers=128, pick=False, channels=32, paired=True, run=16)
WIDE_OPTIONS = OPTIONS | {"forward_summary": _PAIRED, "forward": _PAIRED, "gradient": _PAIRED}
# For blocks of more than 128.
WIDER_OPTIONS = WIDE_OPTIONS | {"summary": Options(pick=False), "gradient": replace(_PAIRED, stages=2)}
# For blocks of more than 160: the shared memory holds one or two such programs.
_LARGE = Options(registers=128, pick=False, warps=8, paired=True, run=16)
WIDEST_OPTIONS = WIDER_OPTIONS | {
    "forward_summary": _LARGE,
    "forward": _LARGE,
    "gradient": replace(_LARGE, resident=1, registers=None),
}
# By widest block.
TABLES = {64: OPTIONS, 128: WIDE_OPTIONS, 160: WIDER_OPTIONS, 256: WIDEST_OPTIONS}


def options(kernel: str, w: int) -> Options:
    """Options of the kernel of that name for gate blocks of w channels."""
    return next(table for widest, table in TABLES.items() if w <= widest)[kernel]


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


def mixer_tiling(w: int, channels: int = 64) -> Tiling:
    """Tile for gate blocks of w channels: the whole block up to so many channels, slices of as many beyond."""
    whole = max(16, next_power_of_two(w))
    m, k1 = min(whole, channels), min(whole, 128)
    k2 = 0 if w <= k1 else max(16, next_power_of_two(w - k1))
    return Tiling(w, cdiv(w, m), m, TILE_TOKENS["mixer"], 4, 2, k1, k2)


def logits_tiling() -> Tiling:
    """Tile where the logits come from memory, ``LOGITS_CHANNELS`` a program."""
    return Tiling(LOGITS_CHANNELS, 1, LOGITS_CHANNELS, TILE_TOKENS["logits"], 4, 2, 16, 0)


# By widest block: input channels and tokens of a tile of ``projection_kernel``, stages of its loads, warps.
PROJECTION_TILES = {128: (128, 64, 3, 8), 160: (64, 64, 3, 8), 256: (64, 64, 2, 8)}


def projection_tile(w: int) -> dict[str, int]:
    """Tile of ``projection_kernel``: both gates' output channels, side by side, come in one or two parts."""
    channels, tokens, stages, warps = next(PROJECTION_TILES[widest] for widest in PROJECTION_TILES if w <= widest)
    m, both = min(max(16, next_power_of_two(w)), channels), max(16, next_power_of_two(2 * w))
    n1 = min(both, 256)
    n2 = 0 if 2 * w <= n1 else max(16, next_power_of_two(2 * w - n1))
    return {
        "w": w, "pieces": cdiv(w, m), "M": m, "N1": n1, "N2": n2, "T": tokens, "STAGES": stages, "num_warps": warps
    }  # fmt: skip


@dataclass(frozen=True)
class Split:
    """How a row falls into segments of pieces of tiles; a program owns a segment, or a piece in a summary."""

    tiles: int
    tiles_per_piece: int
    pieces_per_segment: int
    segments: int

    @property
    def pieces(self) -> int:
        """Pieces of the row."""
        return cdiv(self.tiles, self.tiles_per_piece)

    def numbers(self) -> tuple[int, int, int]:
        """As the kernels take them."""
        return self.tiles_per_piece, self.pieces_per_segment, self.segments


def split_row(length: int, tile_tokens: int, columns: int, programs: int) -> Split:
    """Segments such that ``columns`` channel blocks (of all rows) times segments come close to ``programs``."""
    tiles = cdiv(length, tile_tokens)
    per_segment = cdiv(tiles, max(1, min(tiles, programs // max(1, columns))))
    pieces = max(1, per_segment // PIECE_TILES["all"])
    per_piece = cdiv(per_segment, pieces)
    return Split(tiles, per_piece, pieces, cdiv(tiles, per_piece * pieces))


@lru_cache
def multiprocessors(index: int | None) -> int:
    """Multiprocessors of a CUDA device; a small number where kernels are interpreted, so that rows still split."""
    if index is None or not torch.cuda.is_available():
        return 4 if interpreting() else 132
    return torch.cuda.get_device_properties(index).multi_processor_count


class Problem:
    """One problem's sizes and everything that follows from them; equal problems are the same object.

    Attributes:
        shape: (B, L, W).
        tiling: of the passes' T and w; a kernel's own number of channels is in ``tile``.
        blocks: H, or the slices of ``LOGITS_CHANNELS`` channels where the logits come from memory.
        fused: the gradient kernel keeps the weights' gradients in registers.
        forward, backward: how the passes cut a row.
    """

    def __init__(
        self, shape: tuple[int, int, int], w: int, dtype: torch.dtype, first: bool, state: bool, device: int | None
    ) -> None:
        batch, length, width = self.shape = shape
        self.from_logits = w == 0
        self.tiling = logits_tiling() if self.from_logits else mixer_tiling(w)
        self.w = self.tiling.w
        self.blocks = cdiv(width, self.w)
        self.dtype, self.processors = dtype, multiprocessors(device)
        self.fused = not (self.from_logits or w > FUSED_CHANNELS["gradient"] or options("gradient", self.w).paired)
        self.weights = 0 if self.from_logits else 2 * self.blocks * w * w
        self.vectors = 3 * width
        self.sizes = (batch, length, width, self.blocks)
        self._flags = {"FROM_LOGITS": self.from_logits, "HAS_FIRST": first, "HAS_STATE": state}
        self._flags["WHOLE"] = length % self.tiling.T == 0
        self.operand = tl.float32 if interpreting() else OPERANDS[dtype]
        self.forward, self.backward = (self._split(name) for name in ("forward", "gradient"))
        self.projection = projection_tile(self.w)
        columns = batch * self.blocks * self.projection["pieces"]
        wanted = options("projection", self.w).resident * self.processors
        self.runs = split_row(length, self.projection["T"], columns, wanted)

    def _split(self, kernel: str) -> Split:
        columns = self.programs(kernel, 1)
        return split_row(self.shape[1], self.tiling.T, columns, options(kernel, self.w).resident * self.processors)

    def tile(self, kernel: str) -> Tiling:
        """Tile of that kernel."""
        return self.tiling if self.from_logits else mixer_tiling(self.w, options(kernel, self.w).channels)

    def programs(self, kernel: str, spans: int) -> int:
        """Programs that run that many segments or pieces of every row and channel block."""
        return self.shape[0] * self.blocks * self.tile(kernel).slices * spans

    def constants(self, kernel: str) -> dict[str, Any]:
        """Compile-time arguments of the kernel of that name in ``OPTIONS``."""
        chosen = options(kernel, self.w).arguments()
        if self.dtype == torch.float32 or self.from_logits:
            chosen["PICK"] = False
        return vars(self.tile(kernel)) | chosen | self._flags | {"OPERAND": self.operand}

    @property
    def weight_parts(self) -> int:
        """Partial sums per weight gradient."""
        return self.vector_parts if self.fused else self.shape[0] * self.runs.segments

    @property
    def vector_parts(self) -> int:
        """Partial sums per gradient of a bias or a_param."""
        return self.shape[0] * self.backward.segments


@lru_cache(maxsize=512)
def problem_for(
    shape: tuple[int, int, int], w: int, dtype: torch.dtype, first: bool, state: bool, device: int | None
) -> Problem:
    """The problem of these sizes; w is 0 where the logits come from memory."""
    return Problem(shape, w, dtype, first, state, device)


def clear_plans() -> None:
    """Forgets every problem, after a change of the tables above."""
    problem_for.cache_clear()
