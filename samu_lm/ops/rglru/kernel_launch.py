"""The launches of one RG-LRU call, forward and backward. Legend as in kernel_plan.py."""

from dataclasses import dataclass
from typing import Any, Optional

import torch
import triton.language as tl
from torch import Tensor

from samu_lm.ops.backend import interpreting
from samu_lm.ops.common.launch import cdiv, launch
from samu_lm.ops.rglru.kernel_backward import (
    gradient_kernel,
    projection_kernel,
    reduce_kernel,
    summary_kernel,
)
from samu_lm.ops.rglru.kernel_forward import forward_kernel
from samu_lm.ops.rglru.kernel_plan import (
    FUSED_CHANNELS,
    OPTIONS,
    Split,
    Tiling,
    multiprocessors,
    projection_tile,
    split_row,
)

OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Rows closer than this keep offsets within a tile in 32 bits.
_MAX_STRIDE = 2**31 // 64 - 1


def row_major(x: Tensor) -> Tensor:
    """x itself where its last dimension is dense and its rows close enough for 32-bit offsets within a tile."""
    if x.stride(-1) == 1 and abs(x.stride(1)) <= _MAX_STRIDE:
        return x
    return x.contiguous()


@dataclass
class Call:
    """What every launch of one call shares."""

    x: Tensor
    tiling: Tiling
    blocks: int
    from_logits: bool
    has_first: bool
    has_state: bool

    def split(self, kernel: str) -> Split:
        """Segments for the kernel of that name in ``OPTIONS``."""
        programs = OPTIONS[kernel].resident * multiprocessors(self.x.device.index)
        return split_row(self.x.shape[1], self.tiling.T, self.programs(1), programs)

    def programs(self, segments: int) -> int:
        """Programs that run that many segments of every row and channel block."""
        return self.x.shape[0] * self.blocks * self.tiling.slices * segments

    def sizes(self) -> tuple[int, int, int, int, int, int]:
        batch, length, width = self.x.shape
        return batch, length, width, self.blocks, self.x.stride(0), self.x.stride(1)

    def constants(self, kernel: str) -> dict[str, Any]:
        """Compile-time arguments of the kernel of that name in ``OPTIONS``."""
        options = OPTIONS[kernel].arguments()
        if self.x.dtype == torch.float32 or self.from_logits:
            options["PICK"] = False
        return (
            self.tiling.constants()
            | options
            | {
                "FROM_LOGITS": self.from_logits,
                "HAS_FIRST": self.has_first,
                "HAS_STATE": self.has_state,
                "OPERAND": tl.float32 if interpreting() else OPERANDS[self.x.dtype],
            }
        )


# Gates of a call: (input weight, input bias, a weight, a bias), or logits (input, None, a, None).
Gates = tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor]]  # noqa: UP045


def _pointers(gates: Gates, from_logits: bool) -> tuple[Tensor, ...]:
    """(input logits, a logits, input weight, input bias, a weight, a bias), a dummy where a kernel reads none."""
    input_gate, input_bias, a_gate, a_bias = gates
    if from_logits:
        return input_gate, a_gate, input_gate, input_gate, a_gate, a_gate
    assert input_bias is not None and a_bias is not None
    return input_gate, a_gate, input_gate, input_bias, a_gate, a_bias


def forward(
    call: Call, gates: Gates, a_param: Tensor, first: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    x = call.x
    batch, length, width = x.shape
    split = call.split("forward")
    y = torch.empty((batch, length, width), dtype=x.dtype, device=x.device)
    final_state = x.new_empty((batch, width), dtype=torch.float32)
    saved = x.new_empty((split.tiles, batch, width), dtype=torch.float32)
    summaries = x.new_empty((2, split.segments, batch, width), dtype=torch.float32)
    pointers = (x, *_pointers(gates, call.from_logits), a_param, x if first is None else first)
    state = a_param if initial_state is None else initial_state
    results = (summaries[0], summaries[1], y, saved, final_state)
    numbers = (*call.sizes(), split.tiles, split.tiles_per_segment, split.segments)
    common = {"J": 8, "SAVE": True}
    if split.segments > 1:
        programs = call.programs(split.segments - 1)
        constants = call.constants("forward_summary")
        launch(forward_kernel, programs, *pointers, state, *results, *numbers, SUMMARY=True, **common, **constants)
    constants = call.constants("forward")
    programs = call.programs(split.segments)
    launch(forward_kernel, programs, *pointers, state, *results, *numbers, SUMMARY=False, **common, **constants)
    return y, final_state, saved


def backward(
    call: Call,
    gates: Gates,
    a_param: Tensor,
    first: Tensor | None,
    saved: Tensor,
    grad_y: Tensor,
    grad_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """grad_x, parameter gradients as one float32 vector, grad of the initial state, and of the logits where kept."""
    x, tiling = call.x, call.tiling
    batch, length, width = x.shape
    blocks, w = call.blocks, tiling.w
    fused = w <= FUSED_CHANNELS["gradient"] and not call.from_logits
    split = call.split("gradient")
    grad_y = row_major(grad_y)
    grad_x = torch.empty((batch, length, width), dtype=x.dtype, device=x.device)
    grad_initial = x.new_empty((batch, width), dtype=torch.float32)
    summaries = x.new_empty((2, split.segments, batch, width), dtype=torch.float32)
    grad_li, grad_la = (None, None) if fused else (torch.empty_like(grad_x), torch.empty_like(grad_x))
    weight_count = 0 if call.from_logits else 2 * blocks * w * w
    vector_parts = weight_parts = split.segments * batch
    if not fused:
        tile = projection_tile(w)
        wanted = OPTIONS["projection"].resident * multiprocessors(x.device.index)
        runs = split_row(length, tile["T"], batch * blocks * tile["pieces"], wanted)
        weight_parts = batch * runs.segments
    partial_weights = x.new_empty((weight_parts, weight_count), dtype=torch.float32)
    partial_vectors = x.new_empty((vector_parts, 3 * width), dtype=torch.float32)
    total = x.new_empty(weight_count + 3 * width, dtype=torch.float32)

    input_logits, a_logits, *linear = _pointers(gates, call.from_logits)
    marks = x if first is None else first
    strides = (grad_y.stride(0), grad_y.stride(1))
    numbers = (*call.sizes(), *strides, split.tiles, split.tiles_per_segment, split.segments)
    if split.segments > 1:
        launch(
            summary_kernel, call.programs(split.segments - 1),
            x, a_logits, linear[2], linear[3], a_param, marks, grad_y, summaries[0], summaries[1], *numbers,
            **call.constants("summary"),
        )  # fmt: skip
    constants = call.constants("gradient")
    launch(
        gradient_kernel, call.programs(split.segments),
        x, input_logits, a_logits, *linear, a_param, marks, saved, grad_y,
        a_param if grad_final is None else grad_final, summaries[0], summaries[1], grad_x,
        grad_x if grad_li is None else grad_li, grad_x if grad_la is None else grad_la, partial_weights,
        partial_vectors, grad_initial, *numbers,
        HAS_GRAD_FINAL=grad_final is not None, FUSED=fused, J=8, **constants,
    )  # fmt: skip
    if not fused and not call.from_logits:
        launch(
            projection_kernel, weight_parts * blocks * tile["pieces"],
            x, grad_li, grad_la, linear[0], linear[2], grad_x, partial_weights, length, width, blocks, x.stride(0),
            x.stride(1), runs.segments, runs.tiles_per_segment * tile["T"],
            w=w, OPERAND=constants["OPERAND"], num_warps=8, **tile,
        )  # fmt: skip
    launch(
        reduce_kernel, cdiv(weight_count, 512) + cdiv(3 * width, 512),
        partial_weights, partial_vectors, total, weight_count, 3 * width, weight_parts, vector_parts, N=512,
    )  # fmt: skip
    return grad_x, total, grad_initial, grad_li, grad_la
