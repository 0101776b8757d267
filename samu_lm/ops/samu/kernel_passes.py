"""SAMU on the GPU, host side: allocates the buffers of a pass and starts its kernels in order.

Shapes as in ``kernel.py``. Forward: table, controls, chunk states, prefix (one or two launches), outputs. Backward:
chunk adjoints, prefix in reverse, gradients, rank-two update (unless fused), parameter gradients. Nothing here waits
for the device or looks at a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.samu.kernel_backward import chunk_adjoints_kernel, gradients_kernel
from samu_lm.ops.samu.kernel_controls import (
    controls_kernel,
    given_controls_kernel,
    public_controls_kernel,
    rank_two_kernel,
    scan_token_gradients_kernel,
)
from samu_lm.ops.samu.kernel_fused import controls_and_states_kernel
from samu_lm.ops.samu.kernel_plan import Layout, Plan, layout
from samu_lm.ops.samu.kernel_plan import plan_for as _plan_for
from samu_lm.ops.samu.kernel_prefix import carries_kernel, group_states_kernel
from samu_lm.ops.samu.kernel_scan import chunk_states_kernel, outputs_kernel
from samu_lm.ops.samu.kernel_spectrum import parameter_gradients_kernel, spectrum_table_kernel, table_size


class Parameters(NamedTuple):
    """The mixer's parameters, in the order of the public calls."""

    nu_log: Tensor
    theta_log: Tensor
    phase_direction: Tensor
    radial_direction: Tensor
    phase_amplitude: Tensor
    radial_amplitude: Tensor


class Passes:
    """One problem: its sizes, plan and buffer, and the launches on them."""

    def __init__(self, x: Tensor, save: bool, controls_given: bool) -> None:
        self.batch, self.length, self.width = x.shape
        self.modes = self.width // 2
        if x.stride(2) != 1 and self.width > 1:
            x = x.contiguous()
        self.x = x
        self.stride_t = x.stride(1) if self.length > 1 else self.width
        # Two bfloat16 neighbours may be read as one word.
        self.packed = (
            x.dtype == torch.bfloat16
            and self.modes % 2 == 0
            and x.storage_offset() % 2 == 0
            and self.stride_t % 2 == 0
            and (x.stride(0) % 2 == 0 or self.batch == 1)
        )
        self.plan = _plan_for(self.batch, self.length, self.width)
        self.layout = _layout(self.plan, x, save, controls_given)
        self.device = x.device

    # -- pieces of the kept buffer ------------------------------------------------------------------------------

    def use(self, kept: Tensor) -> None:
        """Takes ``kept`` as the buffer that the layout describes."""
        lay = self.layout
        self.kept = kept
        self.table = kept
        self.records = kept[lay.records :]
        self.chunk_records = kept[lay.chunk_records :]
        self.saved_states = kept[lay.saved_states :] if lay.signs > lay.saved_states else kept
        self.signs = kept[lay.signs :] if lay.total > lay.signs else kept

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # -- forward -------------------------------------------------------------------------------------------------

    def fill_table(self, parameters: Parameters | None, nu_log: Tensor, theta_log: Tensor, spectrum: bool) -> None:
        plan = self.plan
        block = min(64, max(16, next_power_of_two(self.modes)))
        spectrum_programs = cdiv(self.modes, block) if spectrum else 0
        vectors = (nu_log, theta_log) if parameters is None else parameters[2:4]
        scalars = (nu_log, theta_log) if parameters is None else parameters[4:6]
        launch(
            spectrum_table_kernel,
            spectrum_programs + (0 if parameters is None else 2),
            nu_log.contiguous(),
            theta_log.contiguous(),
            *(v.contiguous() for v in vectors),
            *scalars,
            self.table,
            M=self.modes,
            SPECTRUM_PROGRAMS=spectrum_programs,
            CHUNK=plan.chunk,
            GROUP=plan.group,
            BLOCK=block,
            DIRECTION_BLOCK=min(1024, max(16, next_power_of_two(self.width + 1))),
            num_warps=2,
        )

    def _control_sizes(self) -> dict[str, int]:
        plan = self.plan
        block = plan.control_block
        return {
            "M": self.modes,
            "STRIDE_T": self.stride_t,
            "CHUNK": plan.chunk,
            "STEP": plan.step,
            "LEVELS": plan.step.bit_length() - 1,
            "BLOCK": block,
            "MODE_BLOCKS": cdiv(self.modes, block),
            "PER_THREAD": max(1, block // (32 * plan.control_warps)),
            "EVEN": self.modes % block == 0,
            "TAIL": self.length % plan.chunk != 0,
            "PACKED": self.packed,
            "num_warps": plan.control_warps,
        }

    def fill_records_and_states(self, first: Tensor | None, initial_state: Tensor | None, save: bool) -> Tensor:
        """Controls and chunk states in one pass; returns the states."""
        lay, plan = self.layout, self.plan
        states = self.new(lay.chunks, self.width)
        block = plan.control_block
        launch(
            controls_and_states_kernel,
            lay.chunks,
            self.x,
            self.x if first is None else first.contiguous(),
            self.table,
            self.x if initial_state is None else initial_state.contiguous(),
            self.records,
            self.chunk_records,
            states,
            self.length,
            lay.row_chunks,
            lay.chunks,
            self.x.stride(0),
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            PIECE=plan.piece,
            STEP=plan.step,
            LEVELS=plan.step.bit_length() - 1,
            BLOCK=block,
            PER_THREAD=max(1, block // (32 * plan.control_warps)),
            HAS_FIRST=first is not None,
            HAS_INITIAL=initial_state is not None,
            SAVE=save,
            EVEN=self.modes == block,
            TAIL=self.length % plan.chunk != 0,
            PACKED=self.packed,
            num_warps=plan.control_warps,
        )
        return states

    def fill_records(self, first: Tensor | None, save: bool) -> None:
        lay = self.layout
        launch(
            controls_kernel,
            lay.chunks,
            self.x,
            self.x if first is None else first.contiguous(),
            self.table,
            self.records,
            self.chunk_records,
            self.length,
            lay.row_chunks,
            lay.chunks,
            self.x.stride(0),
            HAS_FIRST=first is not None,
            SAVE=save,
            **self._control_sizes(),
        )

    def fill_records_from(self, eta: Tensor, delta: Tensor, first: Tensor | None) -> None:
        lay = self.layout
        launch(
            given_controls_kernel,
            lay.chunks,
            eta.contiguous(),
            delta.contiguous(),
            eta if first is None else first.contiguous(),
            self.records,
            self.chunk_records,
            self.length,
            lay.row_chunks,
            lay.chunks,
            CHUNK=self.plan.chunk,
            HAS_FIRST=first is not None,
            num_warps=1,
        )

    def prefix(self, states: Tensor, reverse: bool) -> None:
        """Turns each chunk's own state (adjoint, with reverse) into what the chunk starts from, in place."""
        lay, group = self.layout, self.plan.group
        row_groups = cdiv(lay.row_chunks, group)
        if row_groups == 1:
            group = max(8, next_power_of_two(lay.row_chunks))
        groups = self.batch * row_groups
        block = min(64, max(16, next_power_of_two(self.modes)))
        mode_blocks = cdiv(self.modes, block)
        # One buffer: the groups' states, then their records.
        group_states = self.new(groups * (self.width + 3)) if row_groups > 1 else states
        args = (
            states,
            self.chunk_records,
            self.table,
            group_states,
            group_states[groups * self.width :] if row_groups > 1 else states,
            lay.row_chunks,
            lay.chunks,
            row_groups,
        )
        sizes = {
            "M": self.modes,
            "GROUP": group,
            "AHEAD": 8,
            "BLOCK": block,
            "MODE_BLOCKS": mode_blocks,
            "REVERSE": reverse,
        }
        if row_groups > 1:
            launch(group_states_kernel, groups * mode_blocks, *args, **sizes, num_warps=1)
        launch(carries_kernel, groups * mode_blocks, *args, **sizes, num_warps=1)

    def scan(self, initial_state: Tensor | None, save: bool, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """y and final state; ``states`` are the chunks' own states where they are there already."""
        lay, plan = self.layout, self.plan
        mode_blocks = cdiv(self.modes, plan.block)
        even = self.modes % plan.block == 0
        y = self.new(self.batch, self.length, self.width, dtype=self.x.dtype)
        final_state = self.new(self.batch, self.width)
        initial = self.x if initial_state is None else initial_state.contiguous()
        if states is None and lay.row_chunks > 1:
            states = self.new(lay.chunks, self.width)
            launch(
                chunk_states_kernel,
                self.batch * (lay.row_chunks - 1) * mode_blocks,
                self.x,
                self.records,
                self.table,
                initial,
                states,
                lay.row_chunks,
                lay.chunks,
                self.x.stride(0),
                M=self.modes,
                STRIDE_T=self.stride_t,
                CHUNK=plan.chunk,
                STEP=plan.step,
                BLOCK=plan.block,
                MODE_BLOCKS=mode_blocks,
                HAS_INITIAL=initial_state is not None,
                EVEN=even,
                PACKED=self.packed,
                num_warps=plan.warps,
            )
        if states is None:
            states = self.table
        elif lay.row_chunks > 1:
            self.prefix(states, reverse=False)
        launch(
            outputs_kernel,
            lay.chunks * mode_blocks,
            self.x,
            self.records,
            self.table,
            initial,
            states,
            y,
            final_state,
            self.saved_states,
            self.signs,
            self.length,
            lay.row_chunks,
            lay.chunks,
            self.x.stride(0),
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            STEP=plan.step,
            SAVE_EVERY=plan.save_every,
            WORD=lay.word,
            BLOCK=plan.block,
            MODE_BLOCKS=mode_blocks,
            HAS_INITIAL=initial_state is not None,
            SAVE=save,
            EVEN=even,
            TAIL=self.length % plan.chunk != 0,
            FLIP=True,
            PACKED=self.packed,
            num_warps=plan.warps,
        )
        return y, final_state

    # -- backward ------------------------------------------------------------------------------------------------

    def messages(self, grad_y: Tensor, grad_final_state: Tensor | None) -> Tensor:
        """What each chunk's last token receives from the chunk after it, ``[B * N, W]``."""
        lay, plan = self.layout, self.plan
        if lay.row_chunks == 1:
            return self.table
        mode_blocks = cdiv(self.modes, plan.block)
        adjoints = self.new(lay.chunks, self.width)
        launch(
            chunk_adjoints_kernel,
            self.batch * (lay.row_chunks - 1) * mode_blocks,
            grad_y,
            grad_y if grad_final_state is None else grad_final_state,
            self.records,
            self.table,
            self.signs,
            adjoints,
            self.length,
            lay.row_chunks,
            lay.chunks,
            M=self.modes,
            CHUNK=plan.chunk,
            STEP=plan.step,
            WORD=lay.word,
            BLOCK=plan.block,
            MODE_BLOCKS=mode_blocks,
            HAS_FINAL=grad_final_state is not None,
            EVEN=self.modes % plan.block == 0,
            TAIL=self.length % plan.chunk != 0,
            PACKED=self.packed,
            num_warps=plan.warps,
        )
        self.prefix(adjoints, reverse=True)
        return adjoints

    def gradients(
        self, grad_y: Tensor, grad_final_state: Tensor | None, has_initial: bool, fused: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """grad_x, grad of the initial state, the token sums, the partial sums, and how many parts the sums have."""
        lay, plan = self.layout, self.plan
        messages = self.messages(grad_y, grad_final_state)
        mode_blocks = cdiv(self.modes, plan.gradient_block)
        grad_x = self.new(self.batch, self.length, self.width, dtype=self.x.dtype)
        grad_initial = self.new(self.batch if has_initial else 0, self.width)
        sums = self.new((2 * mode_blocks + 2) * lay.plane)
        partials = self.new(lay.chunks * (3 * self.modes + 2 * self.width + 8))
        launch(
            gradients_kernel,
            lay.chunks * mode_blocks,
            self.x,
            grad_y,
            grad_y if grad_final_state is None else grad_final_state,
            self.records,
            self.table,
            self.saved_states,
            self.signs,
            messages,
            grad_x,
            sums,
            partials,
            partials[lay.chunks * 3 * self.modes :],
            partials[lay.chunks * (3 * self.modes + 2 * self.width) :],
            sums[2 * mode_blocks * lay.plane :],
            grad_initial if has_initial else grad_x,
            self.length,
            lay.row_chunks,
            lay.chunks,
            self.x.stride(0),
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            STEP=plan.gradient_step,
            LEVELS=plan.gradient_step.bit_length() - 1,
            SAVE_EVERY=plan.save_every,
            WORD=lay.word,
            BLOCK=plan.gradient_block,
            MODE_BLOCKS=mode_blocks,
            PER_THREAD=max(1, plan.gradient_block // (32 * plan.gradient_warps)),
            FUSED=fused,
            REBUILD=plan.rebuild,
            HAS_FINAL=grad_final_state is not None,
            HAS_INITIAL=has_initial,
            EVEN=self.modes % plan.gradient_block == 0,
            TAIL=self.length % plan.chunk != 0,
            FLIP=True,
            PACKED=self.packed,
            num_warps=plan.gradient_warps,
        )
        return grad_x, grad_initial, sums, partials, mode_blocks

    def rank_two(
        self,
        grad_x: Tensor,
        sums: Tensor,
        parts: int,
        partials: Tensor,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        lay, plan, width = self.layout, self.plan, self.width
        launch(
            rank_two_kernel,
            lay.chunks,
            self.x,
            grad_x,
            *((grad_x, grad_x) if given is None else given),
            sums,
            self.table,
            self.records,
            sums[2 * parts * lay.plane :],
            partials[lay.chunks * 3 * self.modes :],
            partials[lay.chunks * (3 * self.modes + 2 * width) :],
            self.length,
            lay.row_chunks,
            lay.chunks,
            self.x.stride(0),
            PARTS=parts,
            GIVEN=given is not None,
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            ROWS=min(16, plan.chunk),
            BLOCK=256,
            EVEN=width % 256 == 0,
            num_warps=4,
        )

    def parameter_gradients(
        self,
        nu_log: Tensor,
        theta_log: Tensor,
        amplitudes: tuple[Tensor, Tensor] | None,
        partials: Tensor,
        spectrum: bool,
    ) -> Tensor:
        """Gradients of every parameter, packed in the order of :class:`Parameters`."""
        lay = self.layout
        block = 32
        spectrum_programs = cdiv(self.modes, block) if spectrum else 0
        direction_programs = 0 if amplitudes is None else cdiv(self.width, block)
        packed = self.new(self.width if amplitudes is None else 3 * self.width + 4)
        launch(
            parameter_gradients_kernel,
            spectrum_programs + 2 * direction_programs,
            nu_log,
            theta_log,
            *((nu_log, nu_log) if amplitudes is None else amplitudes),
            self.table,
            partials,
            lay.chunks,
            partials[lay.chunks * 3 * self.modes :],
            partials[lay.chunks * (3 * self.modes + 2 * self.width) :],
            lay.chunks,
            packed,
            M=self.modes,
            SPECTRUM_PROGRAMS=spectrum_programs,
            DIRECTION_PROGRAMS=max(1, direction_programs),
            ROWS=64,
            BLOCK=block,
            SCALAR_ROWS=1024,
            num_warps=4,
        )
        return packed


def _layout(plan: Plan, x: Tensor, save: bool, controls_given: bool) -> Layout:
    batch, length, width = x.shape
    return layout(plan, batch, length, width, table_size(width), 3 if controls_given else 7, save)


def kept_size(x: Tensor, save: bool, controls_given: bool) -> int:
    """Number of float32 that the forward pass keeps for the backward pass."""
    return _layout(_plan_for(*x.shape), x, save, controls_given).total


def fake_forward(x: Tensor, save: bool, controls_given: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of a forward pass's results, without running it."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final_state = x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)
    return y, final_state, x.new_empty(kept_size(x, save, controls_given) if save else 0, dtype=torch.float32)


def fake_backward(x: Tensor, has_initial: bool) -> tuple[Tensor, Tensor]:
    """grad_x and the initial state's gradient, without running anything."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[0] if has_initial else 0, x.shape[2], dtype=torch.float32)


def mixer_forward(
    x: Tensor, parameters: Parameters, first: Tensor | None, initial_state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, final state, and what the backward pass needs (empty without ``save``)."""
    passes = Passes(x, save, controls_given=False)
    passes.use(passes.new(passes.layout.total))
    passes.fill_table(parameters, parameters.nu_log, parameters.theta_log, spectrum=True)
    states = None
    if passes.plan.fused_controls and passes.layout.row_chunks > 1:
        states = passes.fill_records_and_states(first, initial_state, save)
    else:
        passes.fill_records(first, save)
    y, final_state = passes.scan(initial_state, save, states)
    return y, final_state, passes.kept if save else passes.new(0)


def mixer_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    parameters: Parameters,
    saved: Tensor,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x, the parameters' gradients packed, grad of the initial state (0 rows if there was none)."""
    passes = Passes(x, True, controls_given=False)
    passes.use(saved)
    final = None if grad_final_state is None else grad_final_state.contiguous()
    fused = passes.plan.fused
    grad_x, grad_initial, sums, partials, parts = passes.gradients(grad_y.contiguous(), final, has_initial, fused)
    if not fused:
        passes.rank_two(grad_x, sums, parts, partials)
    amplitudes = (parameters.phase_amplitude, parameters.radial_amplitude)
    nu_log, theta_log = parameters.nu_log.contiguous(), parameters.theta_log.contiguous()
    return grad_x, passes.parameter_gradients(nu_log, theta_log, amplitudes, partials, spectrum=True), grad_initial


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
    passes = Passes(x, save, controls_given=True)
    passes.use(passes.new(passes.layout.total))
    passes.fill_table(None, nu_log, theta_log, spectrum=True)
    passes.fill_records_from(eta, delta, first)
    y, final_state = passes.scan(initial_state, save)
    return y, final_state, passes.kept if save else passes.new(0)


def scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    saved: Tensor,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_x, grad_eta, grad_delta, grads of nu_log and theta_log packed, grad of the initial state."""
    passes = Passes(x, True, controls_given=True)
    passes.use(saved)
    final = None if grad_final_state is None else grad_final_state.contiguous()
    grad_x, grad_initial, sums, partials, parts = passes.gradients(grad_y.contiguous(), final, has_initial, False)
    lay = passes.layout
    grad_eta, grad_delta = (passes.new(passes.batch, passes.length) for _ in range(2))
    launch(
        scan_token_gradients_kernel,
        lay.chunks,
        sums,
        passes.records,
        grad_eta,
        grad_delta,
        passes.length,
        lay.row_chunks,
        lay.chunks,
        PARTS=parts,
        CHUNK=passes.plan.chunk,
        num_warps=1,
    )
    packed = passes.parameter_gradients(nu_log.contiguous(), theta_log.contiguous(), None, partials, spectrum=True)
    return grad_x, grad_eta, grad_delta, packed, grad_initial


def controls_forward(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """eta, delta, and what the backward pass needs."""
    passes = Passes(x, False, controls_given=False)
    passes.use(passes.new(passes.layout.total))
    directions = (phase_direction, radial_direction)
    parameters = Parameters(*directions, *directions, phase_amplitude, radial_amplitude)
    passes.fill_table(parameters, *directions, spectrum=False)
    lay = passes.layout
    eta, delta = (passes.new(passes.batch, passes.length) for _ in range(2))
    launch(
        public_controls_kernel,
        lay.chunks,
        passes.x,
        passes.table,
        passes.records,
        eta,
        delta,
        passes.length,
        lay.row_chunks,
        lay.chunks,
        passes.x.stride(0),
        **passes._control_sizes(),
    )
    return eta, delta, passes.kept


def controls_backward(
    grad_eta: Tensor, grad_delta: Tensor, x: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor]:
    """grad_x and the gradients of the four control parameters, packed behind an unused ``[W]``."""
    passes = Passes(x, False, controls_given=False)
    passes.use(saved)
    lay = passes.layout
    grad_x = passes.new(passes.batch, passes.length, passes.width, dtype=x.dtype)
    partials = passes.new(lay.chunks * (3 * passes.modes + 2 * passes.width + 8))
    sums = passes.new(2 * lay.plane)
    passes.rank_two(grad_x, sums, 0, partials, (grad_eta.contiguous(), grad_delta.contiguous()))
    amplitudes = (phase_amplitude, radial_amplitude)
    return grad_x, passes.parameter_gradients(phase_amplitude, radial_amplitude, amplitudes, partials, spectrum=False)
