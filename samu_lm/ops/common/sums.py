"""How the parts of a sum that a pass's programs found are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.common.reduce import column_sums_kernel

_COLUMNS = 16


def rows_at_once(programs: int) -> int:
    """How many programs' parts ``column_sums`` reads at a time."""
    return min(256, max(16, next_power_of_two(programs)))


def sum_programs(partials: Tensor) -> Tensor:
    """Sums a float32 matrix ``[programs, n]`` over its programs, always in one order: ``[n]``."""
    programs, n = partials.shape
    sums = torch.empty(n, dtype=torch.float32, device=partials.device)
    options = {"ROWS": rows_at_once(programs), "BLOCK": _COLUMNS, "num_warps": 4}
    launch(column_sums_kernel, cdiv(n, _COLUMNS), partials, sums, programs, n, **options)
    return sums
