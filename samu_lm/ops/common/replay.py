"""Launch sequences recorded once and started again with new tensors, at a few microseconds of host time per kernel.

Triton works out at every call which compilation of a kernel fits its arguments; on short sequences that costs more
than the kernels. For one problem (sizes, dtypes, strides, alignment) the answer never changes, and neither do grids
and scalars: only the tensors' addresses do. So the first call runs as usual and leaves a list of steps, and later calls
fill in the addresses. A tensor reaches a kernel as a :class:`Slot`, which says which address to fill in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from samu_lm.ops.common import launch as launching

_KEPT = 512
# Vector loads are compiled for addresses that are multiples of this many bytes.
_ALIGNMENT = 16


def is_plain(x: Tensor) -> bool:
    """Whether nothing watches or rewrites calls on x: no tracing, no tensor subclass, no dispatch mode or transform."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


class Slot:
    """A tensor that differs from call to call: its place among the call's tensors, and an offset in elements.

    An offset is for flat buffers: it is counted from the start of a one-dimensional tensor.
    """

    __slots__ = ("index", "offset", "tensor")

    def __init__(self, tensor: Tensor, index: int, offset: int = 0) -> None:
        self.tensor, self.index, self.offset = tensor, index, offset

    def at(self, offset: int) -> Slot:
        """The same buffer ``offset`` elements further on."""
        return Slot(self.tensor, self.index, self.offset + offset)

    def resolve(self) -> Tensor:
        """The tensor to pass to a kernel."""
        return self.tensor[self.offset :] if self.offset else self.tensor


class _Step:
    """One launch: the compiled kernel and its arguments, with holes where addresses go."""

    __slots__ = ("call", "function", "holes", "metadata", "programs", "values")

    def __init__(self, kernel: Any, compiled: Any, programs: int, args: Sequence[Any], options: dict[str, Any]) -> None:
        self.call, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.programs = programs
        named = dict(zip(kernel.arg_names, args, strict=False))
        named.update(options)
        ordered = [named[name] for name in kernel.arg_names]
        self.values = [0 if isinstance(value, Slot) else value for value in ordered]
        self.holes = [
            (position, value.index, value.offset * value.tensor.element_size())
            for position, value in enumerate(ordered)
            if isinstance(value, Slot)
        ]


def _start(steps: list[_Step], addresses: Sequence[int], stream: int) -> None:
    for step in steps:
        values = step.values.copy()
        for position, index, offset in step.holes:
            values[position] = addresses[index] + offset
        step.call(step.programs, 1, 1, stream, step.function, step.metadata, None, None, None, *values)


class Replays:
    """Recorded sequences of one op, by problem."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Hashable, list[_Step]] = OrderedDict()

    def run(self, key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[list[Any]], None]) -> None:
        """Starts the launches that ``build`` makes.

        Args:
            key: everything that decides which kernels ``build`` starts, on what grids and with which scalars, apart
                from the tensors' dtypes and alignment.
            tensors: the call's tensors, the kernels' addresses lie within them; None for an absent one, but not the
                first.
            build: makes the launches, given a :class:`Slot` (or None) per tensor.
        """
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device < 0 or launching.watched():
            build([None if t is None else Slot(t, i) for i, t in enumerate(tensors)])
        elif device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self._run(key, tensors, build, device)
        else:
            self._run(key, tensors, build, device)

    def _run(
        self, key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[list[Any]], None], device: int
    ) -> None:
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        together = 0
        for address in addresses:
            together |= address
        odd = tuple([a % _ALIGNMENT for a in addresses]) if together % _ALIGNMENT else None
        full_key = (key, odd, tuple([None if t is None else t.dtype for t in tensors]), device)
        steps = self._sequences.get(full_key)
        if steps is not None:
            _start(steps, addresses, torch._C._cuda_getCurrentRawStream(device))
            return
        recorded: list[_Step] = []
        with launching.recording(lambda *launch: recorded.append(_Step(*launch))):
            build([None if t is None else Slot(t, i) for i, t in enumerate(tensors)])
        self._sequences[full_key] = recorded
        if len(self._sequences) > _KEPT:
            self._sequences.popitem(last=False)
