"""The launches of one RG-LRU call, forward and backward. Legend as in kernel_plan.py."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch
from samu_lm.ops.common.replay import Replays, Slot
from samu_lm.ops.rglru.kernel_backward import gradient_kernel, summary_kernel
from samu_lm.ops.rglru.kernel_forward import forward_kernel
from samu_lm.ops.rglru.kernel_plan import Problem
from samu_lm.ops.rglru.kernel_projection import projection_kernel, reduce_kernel

_replays = Replays()
# Pieces whose maps are loaded at a time.
_MAPS = 8
# Columns per program of the last sum.
_COLUMNS = 512


class Gates(NamedTuple):
    """Weights ``[H, w, w]`` and biases ``[H, w]`` of both gates; or their logits ``[B, L, W]``, with no biases."""

    input_gate: Tensor
    input_bias: Tensor | None
    a_gate: Tensor
    a_bias: Tensor | None


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def _float32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _gate_arguments(problem: Problem, x: Slot, gates: list[Slot | None]) -> list[Slot]:
    """(input logits, a logits, input weight, input bias, a weight, a bias); x stands for what a kernel reads not."""
    wi, bi, wa, ba = [x if slot is None else slot for slot in gates]
    return [wi, wa, x, x, x, x] if problem.from_logits else [x, x, wi, bi, wa, ba]


def forward(
    problem: Problem, x: Tensor, gates: Gates, a_param: Tensor, first: Tensor | None, initial_state: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the final state, and the state before every tile (empty without ``save``)."""
    batch, _, width = problem.shape
    split = problem.forward
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state = _float32(x, batch, width)
    saved = _float32(x, split.tiles if save else 0, batch, width)
    half = split.pieces * batch * width if split.segments > 1 else 0
    maps = _float32(x, 2 * half)

    def build(slots: list[Any]) -> None:
        x, *gates, a_param, first, state, y, final_state, saved, maps = slots
        inputs = (x, *_gate_arguments(problem, x, gates), a_param, first or x, state or x)
        numbers = (maps, maps.at(half), y, saved, final_state, *problem.sizes, *split.numbers())
        common = {"J": _MAPS, "SAVE": save}
        if split.segments > 1:
            pieces = (split.segments - 1) * split.pieces_per_segment
            constants = problem.constants("forward_summary") | common
            programs = problem.programs("forward_summary", pieces)
            launch(forward_kernel, programs, *inputs, *numbers, SUMMARY=True, **constants)
        constants = problem.constants("forward") | common
        programs = problem.programs("forward", split.segments)
        launch(forward_kernel, programs, *inputs, *numbers, SUMMARY=False, **constants)

    tensors = [*_dense(x, *gates, a_param, first, initial_state), y, final_state, saved, maps]
    _replays.run((problem, "forward", save), tensors, build)
    return y, final_state, saved


class Gradients(NamedTuple):
    """What ``backward`` returns: ``parameters`` is one float32 vector, in the order of ``parameter_sizes``."""

    x: Tensor
    parameters: Tensor
    initial_state: Tensor
    input_logits: Tensor | None
    a_logits: Tensor | None


def parameter_sizes(problem: Problem) -> list[int]:
    """Sizes of the parts of ``Gradients.parameters``: both weights (if any), both biases, a_param."""
    weights = [problem.weights // 2] * 2 if problem.weights else []
    return [*weights, *[problem.shape[2]] * 3]


def _logits_gradients(problem: Problem, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Room for them: two like x for logits of the caller's, one for both gates where they stay in here, or none."""
    if problem.from_logits:
        return torch.empty_like(x), torch.empty_like(x)
    return None if problem.fused else torch.empty(2 * x.numel(), dtype=x.dtype, device=x.device), None


def backward(
    problem: Problem, x: Tensor, gates: Gates, a_param: Tensor, first: Tensor | None, saved: Tensor, grad_y: Tensor,
    grad_final: Tensor | None,
) -> Gradients:  # fmt: skip
    """Every gradient; those of the logits where the problem has logits."""
    batch, length, width = problem.shape
    split = problem.backward
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_li, grad_la = _logits_gradients(problem, grad_x)
    total, grad_initial = _float32(x, problem.weights + problem.vectors), _float32(x, batch, width)
    half = split.pieces * batch * width if split.segments > 1 else 0
    at_weights = 2 * half
    at_vectors = at_weights + problem.weight_parts * problem.weights
    scratch = _float32(x, at_vectors + problem.vector_parts * problem.vectors)

    def build(slots: list[Any]) -> None:
        x, *gates, a_param, first, saved, grad_y, grad_final, grad_x, grad_li, grad_la, total, grad_initial, scratch = (
            slots
        )
        logits_and_gates = _gate_arguments(problem, x, gates)
        marks, maps, weights, vectors = first or x, scratch.at(0), scratch.at(at_weights), scratch.at(at_vectors)
        numbers = (*problem.sizes, *split.numbers())
        if split.segments > 1:
            pieces = split.pieces - split.pieces_per_segment
            _, a_logits, _, _, a_weight, a_bias = logits_and_gates
            launch(
                summary_kernel, problem.programs("summary", pieces), x, a_logits, a_weight, a_bias, a_param, marks,
                grad_y, maps, maps.at(half), *numbers, **problem.constants("summary"),
            )  # fmt: skip
        launch(
            gradient_kernel, problem.programs("gradient", split.segments), x, *logits_and_gates, a_param, marks, saved,
            grad_y, grad_final or x, maps, maps.at(half), grad_x, grad_li or x, grad_la or x, weights, vectors,
            grad_initial, *numbers, HAS_GRAD_FINAL=grad_final is not None, FUSED=problem.fused, J=_MAPS,
            **problem.constants("gradient"),
        )  # fmt: skip
        if problem.weights and not problem.fused:
            runs, tile = problem.runs, problem.projection
            tokens = runs.tiles_per_piece * runs.pieces_per_segment * tile["T"]
            launch(
                projection_kernel, batch * runs.segments * problem.blocks * tile["pieces"], x, grad_li,
                gates[0], gates[2], grad_x, weights, length, width, problem.blocks, runs.segments, tokens,
                OPERAND=problem.operand, WHOLE=length % tile["T"] == 0, **tile,
            )  # fmt: skip
        launch(
            reduce_kernel, cdiv(problem.weights, _COLUMNS) + cdiv(problem.vectors, _COLUMNS), weights, vectors, total,
            problem.weights, problem.vectors, problem.weight_parts, problem.vector_parts, N=_COLUMNS,
        )  # fmt: skip

    inputs = _dense(x, *gates, a_param, first, saved, grad_y, grad_final)
    tensors = [*inputs, grad_x, grad_li, grad_la, total, grad_initial, scratch]
    _replays.run((problem, "backward", grad_final is None), tensors, build)
    return Gradients(grad_x, total, grad_initial, grad_li, grad_la)
