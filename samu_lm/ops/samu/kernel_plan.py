"""How the SAMU kernels cut up a problem, and where their buffers lie.

Shapes: B rows, L tokens, W = 2M; N = ceil(L / chunk) chunks per row. Every choice changes speed and memory only, never
the function computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from samu_lm.ops.common import dispatch
from samu_lm.ops.common.launch import next_power_of_two
from samu_lm.ops.common.signature import signature_of

# The op's name in calibration records.
OP = "samu_mixer"
# Modes that one program of the gradients pass can hold in registers.
_MOST_FUSED = 1024


@dataclass(frozen=True)
class Plan:
    """Sizes that the kernels are compiled for; all powers of two.

    Attributes:
        chunk: tokens per chunk.
        step: tokens whose rows are loaded ahead of use in the forward passes and in the adjoint pass.
        save_every: tokens per state that the forward pass keeps for the backward pass.
        save_skip: of so many of those states the last is not kept after all (0: all are); chunk is a multiple of
            ``save_every * save_skip``.
        group: chunks per group of the two-level prefix.
        block, warps: modes per program of the passes over tokens, and its warps.
        gradient_step, gradient_block, gradient_warps: the same for the gradients pass.
        fused: the gradients pass holds every mode in one program and completes grad_x itself.
        rebuild: that pass works its transitions out twice rather than keep them.
        fused_controls: controls and chunk states in one kernel, ``piece`` tokens at a time.
        tiles: that kernel sums the logits of a piece over a tile of rows rather than row by row.
        control_registers: most registers per thread of that kernel, 0 for the compiler's choice.
        control_branch: that kernel has a second body without selects, for steps without a first token.
        gradient_prefetch: the gradients pass, if fused, asks for its next step's rows before it works on this one's.
        control_prefetch: that kernel asks for the next piece's rows of x before it works on this one's.
        control_block, control_warps: modes at a time and warps of a program that makes controls.
    """

    chunk: int = 64
    step: int = 8
    save_every: int = 8
    save_skip: int = 0
    group: int = 32
    block: int = 128
    warps: int = 1
    gradient_step: int = 8
    gradient_block: int = 128
    gradient_warps: int = 1
    fused: bool = False
    rebuild: bool = False
    stages: int = 1
    registers: int = 0
    touch: bool = False
    fused_controls: bool = False
    piece: int = 32
    tiles: bool = False
    control_registers: int = 0
    control_branch: bool = False
    control_prefetch: bool = False
    gradient_prefetch: bool = False
    control_block: int = 512
    control_warps: int = 4

    def for_shape(self, length: int, modes: int) -> Plan:
        """This plan with every size cut down to what a problem of ``length`` tokens and ``modes`` modes can use.

        Where one program must hold every mode, its warps grow so that each thread holds as many as the plan says.

        Raises:
            ValueError: states would be kept at other tokens than those that the gradients pass looks for them at.
        """
        for name, step in (("step", self.step), ("gradient_step", self.gradient_step)):
            if self.save_every % step:
                raise ValueError(f"save_every={self.save_every}: must be a multiple of {name}={step}")
        if self.save_skip == 1:
            raise ValueError("save_skip=1: would keep no state; must be 0 or at least 2")
        every = max(16, next_power_of_two(modes))
        fused = self.fused and every <= _MOST_FUSED
        fused_controls = self.fused_controls and every <= 2 * _MOST_FUSED
        chunk, shortest = self.chunk, max(self.step, self.gradient_step, self.save_every * max(1, self.save_skip), 16)
        while chunk > shortest and chunk >= 2 * length:
            chunk //= 2
        gradient_block = every if fused else min(self.gradient_block, every)
        control_block = every if fused_controls else min(self.control_block, every)
        return replace(
            self,
            chunk=chunk,
            fused=fused,
            fused_controls=fused_controls,
            piece=min(self.piece, chunk),
            block=min(self.block, every),
            warps=_warps(self.block, self.warps, min(self.block, every)),
            gradient_block=gradient_block,
            gradient_warps=_warps(self.gradient_block, self.gradient_warps, gradient_block),
            control_block=control_block,
            control_warps=_warps(self.control_block, self.control_warps, control_block),
        )


def _warps(planned_block: int, planned_warps: int, block: int) -> int:
    """Warps that give each thread of a block as many modes as the plan's block does, 1 to 16."""
    return min(16, max(1, planned_warps * block // planned_block))


_override: Plan | None = None
_BASE = signature_of(Path(__file__).parent, Path(dispatch.__file__), dispatch.record_path(OP))
_signature = _BASE


@contextlib.contextmanager
def use_plan(plan: Plan) -> Iterator[None]:
    """Within the block, every problem is cut by ``plan`` (forward and backward must run under the same one)."""
    global _override, _signature
    before = _override, _signature
    _override, _signature = plan, f"{_BASE} {plan}"
    try:
        yield
    finally:
        _override, _signature = before


def override() -> Plan | None:
    """The plan of :func:`use_plan` in force."""
    return _override


def signature() -> str:
    """What decides the sizes of kept buffers, for compiled graphs (see ``ops.common.signature``)."""
    return _signature


def default_plan(batch: int, length: int, width: int) -> Plan:
    """The plan of the nearest calibrated shape; without a record, chunks as long as leave enough programs."""
    found = dispatch.choose(dispatch.read_record(dispatch.record_path(OP))[1], batch, length, width)
    if found is not None:
        return Plan(**found.fields)
    programs = batch * length * width // 256
    chunk = 16
    while chunk < 64 and programs // (2 * chunk) >= 3072:
        chunk *= 2
    return Plan(chunk=chunk, fused=True, rebuild=True)


def plan_for(batch: int, length: int, width: int) -> Plan:
    """The plan that a problem of this shape runs with."""
    plan = default_plan(batch, length, width) if _override is None else _override
    return plan.for_shape(length, width // 2)
