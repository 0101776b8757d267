"""SAMU on the GPU: the sizes of one problem and the layout of its buffers.

Shapes as in ``kernel.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from samu_lm.ops.backend import interpreting
from samu_lm.ops.common.launch import cdiv, next_power_of_two
from samu_lm.ops.samu.kernel_plan import Plan
from samu_lm.ops.samu.kernel_spectrum import table_size


def aligned(n: int) -> int:
    """Rounded up so that the next part of a buffer starts on a 128-byte line."""
    return -(-n // 32) * 32


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of a problem, and what its kernels are compiled for; one object per problem, compared by identity.

    Attributes:
        batch, length, width: B, L, W.
        stride_b, stride_t: of x, in elements; its last stride is 1.
        packed: x may be read as pairs of bfloat16.
        given: the controls are inputs (no token records for their gradients).
        save: the forward pass keeps what the backward pass needs.
        plan: how the problem is cut.
    """

    batch: int
    length: int
    width: int
    stride_b: int
    stride_t: int
    packed: bool
    given: bool
    save: bool
    plan: Plan

    # -- sizes and the layout of buffers, in elements of float32 -------------------------------------------------

    @cached_property
    def modes(self) -> int:
        return self.width // 2

    @cached_property
    def row_chunks(self) -> int:
        return cdiv(self.length, self.plan.chunk)

    @cached_property
    def chunks(self) -> int:
        return self.batch * self.row_chunks

    @cached_property
    def plane(self) -> int:
        """Tokens, rows padded to whole chunks."""
        return self.chunks * self.plan.chunk

    @cached_property
    def word(self) -> int:
        """Tokens per word of rectifier bits."""
        return min(self.plan.chunk, 32)

    @cached_property
    def records_at(self) -> int:
        return aligned(table_size(self.width))

    @cached_property
    def chunk_records_at(self) -> int:
        return self.records_at + aligned((3 if self.given else 7) * self.plane)

    @cached_property
    def saved_states_at(self) -> int:
        return self.chunk_records_at + aligned(3 * self.chunks)

    @cached_property
    def chunk_states(self) -> int:
        """States that a chunk keeps for the backward pass: of every ``save_skip`` the last is left out."""
        due = self.plan.chunk // self.plan.save_every
        return due - due // self.plan.save_skip if self.plan.save_skip else due

    def sectors(self, prefetch: bool) -> int:
        """What ``prefetch_rows`` takes a row of x in; 0 for none (the interpreter knows no inline assembly)."""
        return next_power_of_two(cdiv(self.width, 16)) if prefetch and not interpreting() else 0

    @cached_property
    def signs_at(self) -> int:
        return self.saved_states_at + (aligned(self.chunks * self.chunk_states * self.width) if self.save else 0)

    @cached_property
    def kept_size(self) -> int:
        """What the forward pass writes besides its results: all of it is kept with ``save``."""
        return self.signs_at + (aligned(self.plane // self.word * self.width) if self.save else 0)

    @cached_property
    def row_groups(self) -> int:
        return cdiv(self.row_chunks, self.plan.group)

    @cached_property
    def states_size(self) -> int:
        """A state per chunk, then a state and a record per group."""
        if self.row_chunks == 1:
            return 0
        groups = self.batch * self.row_groups if self.row_groups > 1 else 0
        return aligned(self.chunks * self.width) + groups * (self.width + 3)

    @cached_property
    def gradient_parts(self) -> int:
        return cdiv(self.modes, self.plan.gradient_block)

    @cached_property
    def sums_at(self) -> int:
        """Behind the messages between chunks; in their place each chunk leaves its phase direction's partial sum."""
        return aligned(max(self.states_size, self.chunks * self.width))

    @cached_property
    def token_grads_at(self) -> int:
        return self.sums_at + 2 * self.gradient_parts * self.plane

    @cached_property
    def partials_at(self) -> int:
        return aligned(self.token_grads_at + 2 * self.plane)

    @cached_property
    def radial_partials_at(self) -> int:
        return self.partials_at + self.chunks * 3 * self.modes

    @cached_property
    def scalar_partials_at(self) -> int:
        return self.radial_partials_at + self.chunks * self.width

    @cached_property
    def backward_scratch(self) -> int:
        return self.scalar_partials_at + self.chunks * 8

    @cached_property
    def tail(self) -> bool:
        return self.length % self.plan.chunk != 0
