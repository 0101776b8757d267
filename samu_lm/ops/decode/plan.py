"""How the kernels of one decoded token are cut up; choices of speed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


def _is_power_of_two(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Split:
    """How a kernel's outputs are dealt to programs.

    Attributes:
        size: outputs per program, a power of two: rows of a matrix (of each of two), modes or channels.
        warps: warps per program, a power of two.
        tile: inputs of a matrix that are multiplied at a time, a power of two; 0 for the largest that the matrix has.
        groups: parts of a program's rows that are worked on one after another, a power of two; they read a vector once.
    """

    size: int
    warps: int
    tile: int = 0
    groups: int = 1

    def pieces(self, inputs: int) -> dict[str, int]:
        """The kernels' sizes for a matrix of so many inputs, an even number: tiles in words of two."""
        words = inputs // 2
        tile = 1 << (words.bit_length() - 1)
        if self.tile:
            tile = min(tile, max(1, self.tile // 2))
        rest = words % tile
        groups = min(self.groups, self.size)
        dealt = {"ROWS": self.size // groups, "GROUPS": groups, "num_warps": self.warps}
        return dealt | {"TILE": tile, "WHOLE": words // tile, "REST": 1 << (rest - 1).bit_length() if rest else 0}


@dataclass(frozen=True)
class Plan:
    """A split per kernel.

    Attributes:
        input: the two projections before the recurrence (rows of each).
        samu, rglru: convolution and recurrence: modes, and channels.
        output: the projection after it.
        mlp_input: the MLP's gate and up (rows of each).
        mlp_output: its down.
        logits: the output layer.
        overlap: kernels start before the last one has ended, where the GPU can do that.
    """

    input: Split = Split(4, 4, 256)
    samu: Split = Split(64, 4)
    rglru: Split = Split(8, 4)
    output: Split = Split(4, 4, 256)
    mlp_input: Split = Split(4, 4, 256)
    mlp_output: Split = Split(4, 4, 256)
    logits: Split = Split(8, 4, 256)
    overlap: bool = True

    def changed(self, changes: Mapping[str, Any]) -> Plan:
        """This plan with some splits replaced: ``{"output": [4, 4, 512], "overlap": false}``.

        Raises:
            ValueError: an unknown name, or numbers that are no powers of two; the message names it.
        """
        values: dict[str, Any] = {}
        names = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in names:
                raise ValueError(f"{name}={value!r}: unknown; must be one of {', '.join(names)}")
            if name == "overlap":
                if not isinstance(value, bool):
                    raise ValueError(f"overlap={value!r}: must be true or false")
                values[name] = value
                continue
            numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
            good = len(numbers) in (2, 3, 4) and all(map(_is_power_of_two, numbers[:2] + numbers[3:]))
            if not good or not all(_is_power_of_two(n) or n == 0 for n in numbers[2:3]):
                raise ValueError(f"{name}={value!r}: must be [size, warps, tile, groups], powers of two")
            values[name] = Split(*numbers)
        return replace(self, **values)

    def as_dict(self) -> dict[str, Any]:
        """What :meth:`changed` takes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: [v.size, v.warps, v.tile, v.groups] if isinstance(v, Split) else v for k, v in values.items()}


# Fastest found for one row of the 400m models on an H200 (docs/performance.md). With more rows they spill registers.
_FOUND: dict[str, dict[str, Any]] = {
    "samu": {
        "input": [2, 4, 512],
        "samu": [32, 8],
        "output": [16, 4, 256, 4],
        "mlp_input": [32, 8, 256, 4],
        "mlp_output": [8, 8, 512, 2],
        "logits": [16, 8, 256, 2],
    },
    "rglru": {
        "input": [4, 2, 256, 2],
        "rglru": [8, 8],
        "output": [4, 4, 256],
        "mlp_input": [32, 8, 256, 4],
        "mlp_output": [4, 2, 256, 2],
        "logits": [4, 4, 256],
    },
}


def default_plan(mixer: str, rows: int = 1) -> Plan:
    """The plan that a model with that mixer decodes so many rows with, unless one is given."""
    return Plan().changed(_FOUND.get(mixer, {}) if rows == 1 else {})
