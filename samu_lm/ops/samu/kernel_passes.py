"""SAMU on the GPU, host side: allocates a pass's buffers and starts its kernels.

Shapes as in ``kernel.py``. Forward: table, controls, chunk states, prefix (one or two launches), outputs. Backward:
chunk adjoints, prefix in reverse, gradients, rank-two update (unless fused), parameter gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.common.replay import Replays, Slot
from samu_lm.ops.samu import kernel_plan
from samu_lm.ops.samu.kernel_controls import public_controls_kernel
from samu_lm.ops.samu.kernel_problem import Problem
from samu_lm.ops.samu.kernel_rank_two import scan_token_gradients_kernel
from samu_lm.ops.samu.kernel_step import step_kernel

_replays = Replays()
_problems: dict[Hashable, Problem] = {}
_MOST_PROBLEMS = 1024
# A step holds a row in one program; wider rows take the general path.
_WIDEST_STEP = 4096


class Parameters(NamedTuple):
    """The mixer's parameters, in the order of the public calls."""

    nu_log: Tensor
    theta_log: Tensor
    phase_direction: Tensor
    radial_direction: Tensor
    phase_amplitude: Tensor
    radial_amplitude: Tensor


def _rows(x: Tensor) -> Tensor:
    """x as the kernels read it: a token's channels next to each other."""
    return x if x.stride(2) == 1 else x.contiguous()


def problem_for(x: Tensor, given: bool, save: bool) -> Problem:
    """The problem that x of :func:`_rows` poses."""
    key = (x.shape, x.stride(), x.dtype, x.storage_offset() % 2, given, save, kernel_plan.override())
    problem = _problems.get(key)
    if problem is None:
        batch, length, width = x.shape
        stride_b, stride_t, _ = x.stride()
        if length == 1:
            stride_t = width
        packed = x.dtype == torch.bfloat16 and width % 4 == 0 and stride_t % 2 == 0 and stride_b % 2 == 0
        packed = packed and x.storage_offset() % 2 == 0
        plan = kernel_plan.plan_for(batch, length, width)
        problem = Problem(batch, length, width, stride_b, stride_t, packed, given, save, plan)
        if len(_problems) >= _MOST_PROBLEMS:
            _problems.clear()
        _problems[key] = problem
    return problem


def _kept_size(x: Tensor, given: bool, save: bool) -> int:
    batch, length, width = x.shape
    return Problem(batch, length, width, 0, 0, False, given, save, kernel_plan.plan_for(batch, length, width)).kept_size


def fake_forward(x: Tensor, save: bool, given: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of a forward pass's results, without running it."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final_state = x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)
    return y, final_state, x.new_empty(_kept_size(x, given, save) if save else 0, dtype=torch.float32)


def fake_controls(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`fake_forward`, of the controls."""
    eta, delta = (x.new_empty(x.shape[0], x.shape[1], dtype=torch.float32) for _ in range(2))
    return eta, delta, x.new_empty(_kept_size(x, given=False, save=False), dtype=torch.float32)


def fake_backward(x: Tensor, has_initial: bool) -> tuple[Tensor, Tensor]:
    """grad_x and the initial state's gradient, without running anything."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[0] if has_initial else 0, x.shape[2], dtype=torch.float32)


def _float32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def mixer_forward(
    x: Tensor, parameters: Parameters, first: Tensor | None, initial_state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, final state, and what the backward pass needs (of no use without ``save``)."""
    x = _rows(x)
    if x.shape[1] == 1 and not save and x.shape[2] <= _WIDEST_STEP:
        return _step(x, parameters, first, initial_state)
    problem = problem_for(x, given=False, save=save)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state, kept = _float32(x, problem.batch, problem.width), _float32(x, problem.kept_size)
    states = _float32(x, problem.states_size)

    def build(slots: list[Slot]) -> None:
        x, nu_log, theta_log, phase, radial, *amplitudes, first, initial, y, final_state, kept, states = slots
        problem.fill_table(kept, nu_log, theta_log, (phase, radial), (amplitudes[0], amplitudes[1]))
        if problem.plan.fused_controls and problem.row_chunks > 1:
            problem.fill_records_and_states(x, first, initial, kept, states)
        else:
            problem.fill_records(x, first, kept)
            if problem.row_chunks > 1:
                problem.fill_states(x, initial, kept, states)
        if problem.row_chunks > 1:
            problem.prefix(kept, states, reverse=False)
        problem.outputs(x, initial, kept, states, y, final_state)

    tensors = [x, *_dense(*parameters, first, initial_state), y, final_state, kept, states]
    _replays.run((problem, first is None, initial_state is None), tensors, build)
    return y, final_state, kept


def _step(
    x: Tensor, parameters: Parameters, first: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row, in one launch."""
    batch, _, width = x.shape
    y, final_state = torch.empty(x.shape, dtype=x.dtype, device=x.device), _float32(x, batch, width)

    def build(slots: list[Slot]) -> None:
        x_slot, nu_log, theta_log, phase, radial, *amplitudes, first, state, y, final_state = slots
        block = max(32, next_power_of_two(width // 2))
        launch(
            step_kernel,
            batch,
            x_slot,
            first or x_slot,
            nu_log,
            theta_log,
            phase,
            radial,
            *amplitudes,
            state or final_state,
            y,
            final_state,
            x.stride(0),
            M=width // 2,
            BLOCK=block,
            HAS_FIRST=first is not None,
            HAS_STATE=state is not None,
            num_warps=min(8, max(1, block // 128)),
        )

    tensors = [x, *_dense(*parameters, first, state), y, final_state]
    _replays.run(("step", x.shape, x.stride(0), first is None, state is None), tensors, build)
    return y, final_state, final_state


def mixer_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    parameters: Parameters,
    kept: Tensor,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_x, the parameters' gradients packed, grad of the initial state."""
    x, grad_y = _rows(x), grad_y.contiguous()
    problem = problem_for(x, given=False, save=True)
    if problem.packed and grad_y.storage_offset() % 2:
        grad_y = grad_y.clone()
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_initial = _float32(x, problem.batch, problem.width) if has_initial else None
    packed, scratch = _float32(x, 3 * problem.width + 4), _float32(x, problem.backward_scratch)

    def build(slots: list[Slot]) -> None:
        x, grad_y, grad_final, nu_log, theta_log, *amplitudes, kept, grad_x, grad_initial, packed, scratch = slots
        fused = problem.plan.fused
        problem.fill_messages(grad_y, grad_final, kept, scratch)
        problem.gradients(x, grad_y, grad_final, kept, scratch, grad_x, grad_initial, fused)
        if not fused:
            problem.rank_two(x, kept, scratch, grad_x)
        problem.parameter_gradients(kept, scratch, packed, nu_log, theta_log, (amplitudes[0], amplitudes[1]))

    values = _dense(grad_final_state, *parameters[:2], *parameters[4:])
    tensors = [x, grad_y, *values, kept, grad_x, grad_initial, packed, scratch]
    _replays.run((problem, grad_final_state is None, has_initial), tensors, build)
    return grad_x, packed, grad_initial


def scan_forward(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`mixer_forward`, from given controls."""
    x = _rows(x)
    problem = problem_for(x, given=True, save=save)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state, kept = _float32(x, problem.batch, problem.width), _float32(x, problem.kept_size)
    states = _float32(x, problem.states_size)

    def build(slots: list[Slot]) -> None:
        x, eta, delta, nu_log, theta_log, first, initial, y, final_state, kept, states = slots
        problem.fill_table(kept, nu_log, theta_log)
        problem.fill_given_records(eta, delta, first, kept)
        if problem.row_chunks > 1:
            problem.fill_states(x, initial, kept, states)
            problem.prefix(kept, states, reverse=False)
        problem.outputs(x, initial, kept, states, y, final_state)

    tensors = [x, *_dense(eta, delta, nu_log, theta_log, first, initial_state), y, final_state, kept, states]
    _replays.run((problem, first is None, initial_state is None), tensors, build)
    return y, final_state, kept


def scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    kept: Tensor,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """grad_x, grad_eta, grad_delta, grads of nu_log and theta_log packed, grad of the initial state."""
    x, grad_y = _rows(x), grad_y.contiguous()
    problem = problem_for(x, given=True, save=True)
    if problem.packed and grad_y.storage_offset() % 2:
        grad_y = grad_y.clone()
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_initial = _float32(x, problem.batch, problem.width) if has_initial else None
    grad_eta, grad_delta = (_float32(x, problem.batch, problem.length) for _ in range(2))
    packed, scratch = _float32(x, problem.width), _float32(x, problem.backward_scratch)

    def build(slots: list[Slot]) -> None:
        x, grad_y, final, nu_log, theta_log, kept, grad_x, initial, grad_eta, grad_delta, packed, scratch = slots
        problem.fill_messages(grad_y, final, kept, scratch)
        problem.gradients(x, grad_y, final, kept, scratch, grad_x, initial, fused=False)
        launch(
            scan_token_gradients_kernel,
            problem.chunks,
            scratch.at(problem.sums_at),
            kept.at(problem.records_at),
            grad_eta,
            grad_delta,
            problem.length,
            problem.row_chunks,
            problem.chunks,
            PARTS=problem.gradient_parts,
            CHUNK=problem.plan.chunk,
            num_warps=1,
        )
        problem.parameter_gradients(kept, scratch, packed, nu_log, theta_log)

    outputs = [kept, grad_x, grad_initial, grad_eta, grad_delta, packed, scratch]
    tensors = [x, grad_y, *_dense(grad_final_state, nu_log, theta_log), *outputs]
    _replays.run((problem, grad_final_state is None, has_initial), tensors, build)
    return grad_x, grad_eta, grad_delta, packed, grad_initial


def controls_forward(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """eta, delta, and what the backward pass needs."""
    x = _rows(x)
    problem = problem_for(x, given=False, save=False)
    eta, delta = (_float32(x, problem.batch, problem.length) for _ in range(2))
    kept = _float32(x, problem.kept_size)

    def build(slots: list[Slot]) -> None:
        x, phase, radial, phase_amplitude, radial_amplitude, eta, delta, kept = slots
        problem.fill_table(kept, None, None, (phase, radial), (phase_amplitude, radial_amplitude))
        launch(
            public_controls_kernel,
            problem.chunks,
            x,
            kept,
            kept.at(problem.records_at),
            eta,
            delta,
            problem.length,
            problem.row_chunks,
            problem.chunks,
            problem.stride_b,
            MODE_BLOCKS=cdiv(problem.modes, problem.plan.control_block),
            **problem.control_sizes(),
        )

    parameters = _dense(phase_direction, radial_direction, phase_amplitude, radial_amplitude)
    _replays.run((problem, "controls"), [x, *parameters, eta, delta, kept], build)
    return eta, delta, kept


def controls_backward(
    grad_eta: Tensor, grad_delta: Tensor, x: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """grad_x and the gradients of the four control parameters, packed behind an unused ``[W]``."""
    x = _rows(x)
    problem = problem_for(x, given=False, save=False)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    packed, scratch = _float32(x, 3 * problem.width + 4), _float32(x, problem.backward_scratch)

    def build(slots: list[Slot]) -> None:
        x, grad_eta, grad_delta, phase_amplitude, radial_amplitude, kept, grad_x, packed, scratch = slots
        problem.rank_two(x, kept, scratch, grad_x, (grad_eta, grad_delta))
        problem.parameter_gradients(kept, scratch, packed, None, None, (phase_amplitude, radial_amplitude))

    values = _dense(grad_eta, grad_delta, phase_amplitude, radial_amplitude)
    _replays.run((problem, "controls backward"), [x, *values, kept, grad_x, packed, scratch], build)
    return grad_x, packed
