"""SAMU on the GPU: the launches of each pass over one problem.

Shapes as in ``kernel.py``. A :class:`Problem` holds no tensors: it is made once per shape, strides and plan, and its
methods start kernels on the slots they are given. Nothing here waits for the device or looks at a value.
"""

from __future__ import annotations

from typing import Any

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.common.replay import Slot
from samu_lm.ops.common.sums import rows_at_once
from samu_lm.ops.samu.kernel_backward import chunk_adjoints_kernel, gradients_kernel
from samu_lm.ops.samu.kernel_controls import controls_kernel, given_controls_kernel
from samu_lm.ops.samu.kernel_fused import controls_and_states_kernel
from samu_lm.ops.samu.kernel_prefix import carries_kernel, group_states_kernel
from samu_lm.ops.samu.kernel_rank_two import rank_two_kernel
from samu_lm.ops.samu.kernel_scan import chunk_states_kernel, outputs_kernel
from samu_lm.ops.samu.kernel_sizes import Sizes, aligned
from samu_lm.ops.samu.kernel_spectrum import parameter_gradients_kernel, spectrum_table_kernel


class Problem(Sizes):
    """The launches of each pass; tensors come as slots."""

    # -- forward -------------------------------------------------------------------------------------------------

    def fill_table(
        self,
        kept: Slot,
        nu_log: Slot | None,
        theta_log: Slot | None,
        directions: tuple[Slot, Slot] | None = None,
        amplitudes: tuple[Slot, Slot] | None = None,
    ) -> None:
        """The parameters' table: spectrum, unit directions and scales, those that are given."""
        block = min(64, max(16, next_power_of_two(self.modes)))
        spectrum_programs = 0 if nu_log is None else cdiv(self.modes, block)
        absent = (kept, kept)
        launch(
            spectrum_table_kernel,
            spectrum_programs + (0 if directions is None else 2),
            nu_log or kept,
            theta_log or kept,
            *(directions or absent),
            *(amplitudes or absent),
            kept,
            M=self.modes,
            SPECTRUM_PROGRAMS=spectrum_programs,
            CHUNK=self.plan.chunk,
            GROUP=self.plan.group,
            BLOCK=block,
            DIRECTION_BLOCK=min(1024, max(16, next_power_of_two(self.width + 1))),
            num_warps=2,
        )

    def control_sizes(self) -> dict[str, Any]:
        """Compile-time sizes of the kernels that make controls."""
        plan = self.plan
        return {
            "M": self.modes,
            "STRIDE_T": self.stride_t,
            "CHUNK": plan.chunk,
            "STEP": plan.step,
            "LEVELS": plan.step.bit_length() - 1,
            "BLOCK": plan.control_block,
            "PER_THREAD": max(1, plan.control_block // (32 * plan.control_warps)),
            "EVEN": self.modes % plan.control_block == 0,
            "TAIL": self.tail,
            "PACKED": self.packed,
            "num_warps": plan.control_warps,
        }

    def fill_records(self, x: Slot, first: Slot | None, kept: Slot) -> None:
        """Token and chunk records from x."""
        launch(
            controls_kernel,
            self.chunks,
            x,
            first or x,
            kept,
            kept.at(self.records_at),
            kept.at(self.chunk_records_at),
            self.length,
            self.row_chunks,
            self.chunks,
            self.stride_b,
            HAS_FIRST=first is not None,
            SAVE=self.save,
            TOUCH=self.plan.touch and self.plan.control_block >= 64,
            MODE_BLOCKS=cdiv(self.modes, self.plan.control_block),
            **self.control_sizes(),
        )

    def fill_given_records(self, eta: Slot, delta: Slot, first: Slot | None, kept: Slot) -> None:
        """Token and chunk records from controls that the caller gives."""
        launch(
            given_controls_kernel,
            self.chunks,
            eta,
            delta,
            first or eta,
            kept.at(self.records_at),
            kept.at(self.chunk_records_at),
            self.length,
            self.row_chunks,
            self.chunks,
            CHUNK=self.plan.chunk,
            HAS_FIRST=first is not None,
            num_warps=1,
        )

    def fill_records_and_states(
        self, x: Slot, first: Slot | None, initial: Slot | None, kept: Slot, states: Slot
    ) -> None:
        """Token and chunk records and the chunks' own states in one kernel."""
        launch(
            controls_and_states_kernel,
            self.chunks,
            x,
            first or x,
            kept,
            initial or x,
            kept.at(self.records_at),
            kept.at(self.chunk_records_at),
            states,
            self.length,
            self.row_chunks,
            self.chunks,
            self.stride_b,
            PIECE=self.plan.piece,
            TILES=self.plan.tiles,
            BRANCH=self.plan.control_branch,
            SECTORS=self.sectors(self.plan.control_prefetch),
            HAS_FIRST=first is not None,
            HAS_INITIAL=initial is not None,
            SAVE=self.save,
            **self.control_sizes(),
            **({"maxnreg": self.plan.control_registers} if self.plan.control_registers else {}),
        )

    def fill_states(self, x: Slot, initial: Slot | None, kept: Slot, states: Slot) -> None:
        """The chunks' own states."""
        plan = self.plan
        mode_blocks = cdiv(self.modes, plan.block)
        launch(
            chunk_states_kernel,
            self.batch * (self.row_chunks - 1) * mode_blocks,
            x,
            kept.at(self.records_at),
            kept,
            initial or x,
            states,
            self.row_chunks,
            self.chunks,
            self.stride_b,
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            STEP=plan.step,
            BLOCK=plan.block,
            MODE_BLOCKS=mode_blocks,
            HAS_INITIAL=initial is not None,
            EVEN=self.modes % plan.block == 0,
            FLIP=True,
            PACKED=self.packed,
            num_warps=plan.warps,
        )

    def prefix(self, kept: Slot, states: Slot, reverse: bool) -> None:
        """Turns each chunk's own state (adjoint, with reverse) into what the chunk starts from, in place."""
        group, two_levels = self.plan.group, self.row_groups > 1
        if not two_levels:
            group = max(8, next_power_of_two(self.row_chunks))
        groups = self.batch * self.row_groups
        block = min(64, max(16, next_power_of_two(self.modes)))
        mode_blocks = cdiv(self.modes, block)
        group_states = states.at(aligned(self.chunks * self.width)) if two_levels else states
        args = (
            states,
            kept.at(self.chunk_records_at),
            kept,
            group_states,
            group_states.at(groups * self.width) if two_levels else states,
            self.row_chunks,
            self.chunks,
            self.row_groups,
        )
        sizes = {"M": self.modes, "GROUP": group, "AHEAD": min(8, group), "BLOCK": block, "MODE_BLOCKS": mode_blocks}
        if two_levels:
            launch(group_states_kernel, groups * mode_blocks, *args, **sizes, REVERSE=reverse, num_warps=1)
        launch(carries_kernel, groups * mode_blocks, *args, **sizes, REVERSE=reverse, num_warps=1)

    def outputs(self, x: Slot, initial: Slot | None, kept: Slot, states: Slot, y: Slot, final_state: Slot) -> None:
        """y and the final state, each chunk from what it starts from; with ``save``, states and rectifier bits."""
        plan = self.plan
        mode_blocks = cdiv(self.modes, plan.block)
        launch(
            outputs_kernel,
            self.chunks * mode_blocks,
            x,
            kept.at(self.records_at),
            kept,
            initial or x,
            states,
            y,
            final_state,
            kept.at(self.saved_states_at) if self.save else kept,
            kept.at(self.signs_at) if self.save else kept,
            self.length,
            self.row_chunks,
            self.chunks,
            self.stride_b,
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            STEP=plan.step,
            SAVE_EVERY=plan.save_every,
            SAVE_SKIP=plan.save_skip,
            CHUNK_STATES=self.chunk_states,
            WORD=self.word,
            BLOCK=plan.block,
            MODE_BLOCKS=mode_blocks,
            HAS_INITIAL=initial is not None,
            SAVE=self.save,
            EVEN=self.modes % plan.block == 0,
            TAIL=self.tail,
            FLIP=self.plan.fused_controls or self.given,
            PACKED=self.packed,
            num_warps=plan.warps,
        )

    # -- backward ------------------------------------------------------------------------------------------------

    def fill_messages(self, grad_y: Slot, grad_final: Slot | None, kept: Slot, scratch: Slot) -> None:
        """What each chunk's last token receives from the chunk after it, at the start of ``scratch``."""
        if self.row_chunks == 1:
            return
        plan = self.plan
        mode_blocks = cdiv(self.modes, plan.block)
        launch(
            chunk_adjoints_kernel,
            self.batch * (self.row_chunks - 1) * mode_blocks,
            grad_y,
            grad_final or grad_y,
            kept.at(self.records_at),
            kept,
            kept.at(self.signs_at),
            scratch,
            self.length,
            self.row_chunks,
            self.chunks,
            M=self.modes,
            CHUNK=plan.chunk,
            STEP=plan.step,
            WORD=self.word,
            BLOCK=plan.block,
            MODE_BLOCKS=mode_blocks,
            HAS_FINAL=grad_final is not None,
            EVEN=self.modes % plan.block == 0,
            TAIL=self.tail,
            PACKED=self.packed,
            num_warps=plan.warps,
        )
        self.prefix(kept, scratch, reverse=True)

    def gradients(
        self,
        x: Slot,
        grad_y: Slot,
        grad_final: Slot | None,
        kept: Slot,
        scratch: Slot,
        grad_x: Slot,
        grad_initial: Slot | None,
        fused: bool,
    ) -> None:
        """grad_x (complete if ``fused``), the initial state's gradient, sums and partial sums in ``scratch``."""
        plan = self.plan
        launch(
            gradients_kernel,
            self.chunks * self.gradient_parts,
            x,
            grad_y,
            grad_final or grad_y,
            kept.at(self.records_at),
            kept,
            kept.at(self.saved_states_at),
            kept.at(self.signs_at),
            scratch,
            grad_x,
            scratch.at(self.sums_at),
            scratch.at(self.partials_at),
            scratch,
            scratch.at(self.radial_partials_at),
            scratch.at(self.scalar_partials_at),
            scratch.at(self.token_grads_at),
            grad_initial or grad_x,
            self.length,
            self.row_chunks,
            self.chunks,
            self.stride_b,
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=plan.chunk,
            STEP=plan.gradient_step,
            LEVELS=plan.gradient_step.bit_length() - 1,
            SAVE_EVERY=plan.save_every,
            SAVE_SKIP=plan.save_skip,
            CHUNK_STATES=self.chunk_states,
            WORD=self.word,
            BLOCK=plan.gradient_block,
            MODE_BLOCKS=self.gradient_parts,
            PER_THREAD=max(1, plan.gradient_block // (32 * plan.gradient_warps)),
            FUSED=fused,
            REBUILD=plan.rebuild,
            STAGES=plan.stages,
            TOUCH=plan.touch and plan.gradient_block >= 64,
            SECTORS=self.sectors(plan.gradient_prefetch and fused),
            HAS_FINAL=grad_final is not None,
            HAS_INITIAL=grad_initial is not None,
            EVEN=self.modes % plan.gradient_block == 0,
            TAIL=self.tail,
            FLIP=True,
            PACKED=self.packed,
            num_warps=plan.gradient_warps,
            **({"maxnreg": plan.registers} if plan.registers else {}),
        )

    def rank_two(
        self, x: Slot, kept: Slot, scratch: Slot, grad_x: Slot, given: tuple[Slot, Slot] | None = None
    ) -> None:
        """Adds the controls' share to grad_x; with the controls' own gradients ``given``, writes it."""
        launch(
            rank_two_kernel,
            self.chunks,
            x,
            grad_x,
            *(given or (grad_x, grad_x)),
            scratch.at(self.sums_at),
            kept,
            kept.at(self.records_at),
            scratch.at(self.token_grads_at),
            scratch,
            scratch.at(self.radial_partials_at),
            scratch.at(self.scalar_partials_at),
            self.length,
            self.row_chunks,
            self.chunks,
            self.stride_b,
            M=self.modes,
            STRIDE_T=self.stride_t,
            CHUNK=self.plan.chunk,
            ROWS=min(16, self.plan.chunk),
            BLOCK=256,
            PARTS=self.gradient_parts,
            GIVEN=given is not None,
            EVEN=self.width % 256 == 0,
            num_warps=4,
        )

    def parameter_gradients(
        self,
        kept: Slot,
        scratch: Slot,
        packed: Slot,
        nu_log: Slot | None,
        theta_log: Slot | None,
        amplitudes: tuple[Slot, Slot] | None = None,
    ) -> None:
        """Reduces the partial sums to the gradients of the parameters that are given, at their places in ``packed``."""
        block = 8  # a sector of columns: enough programs to fill the device
        spectrum_programs = 0 if nu_log is None else cdiv(self.modes, block)
        direction_programs = 0 if amplitudes is None else cdiv(self.width, block)
        launch(
            parameter_gradients_kernel,
            spectrum_programs + 2 * direction_programs,
            nu_log or kept,
            theta_log or kept,
            *(amplitudes or (kept, kept)),
            kept,
            scratch.at(self.partials_at),
            self.chunks,
            scratch,
            scratch.at(self.radial_partials_at),
            scratch.at(self.scalar_partials_at),
            self.chunks,
            packed,
            M=self.modes,
            SPECTRUM_PROGRAMS=spectrum_programs,
            DIRECTION_PROGRAMS=max(1, direction_programs),
            ROWS=rows_at_once(self.chunks),
            BLOCK=block,
            SCALAR_ROWS=1024,
            num_warps=4,
        )
