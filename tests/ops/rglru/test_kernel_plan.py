"""RG-LRU's kernels under plans other than the one in force, in the interpreter against the float64 loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from samu_lm.ops.rglru import kernel_plan
from tests.ops.rglru import test_kernel as widths
from tests.ops.support import random_reset

pytestmark = pytest.mark.usefixtures("poisoned_memory")
small_tiles = widths._small_tiles  # the fixture serves this module, too


@pytest.mark.parametrize("pick", [True, False], ids=["pick", "shared memory"])
@pytest.mark.parametrize(
    ("paired", "channels", "w"), [(True, 64, 128), (True, 32, 72), (True, 64, 160), (False, 64, 160)], ids=str
)
def test_order_of_rows(monkeypatch: pytest.MonkeyPatch, paired: bool, channels: int, w: int, pick: bool) -> None:
    """Both orders of the gates' rows, slices of a block, x and the gradient by a product or out of shared memory."""
    for table in (kernel_plan.WIDE_OPTIONS, kernel_plan.WIDER_OPTIONS):
        for name in ("forward_summary", "forward", "gradient"):
            warps = channels // 8 if paired else 4
            chosen = dataclasses.replace(table[name], paired=paired, channels=channels, pick=pick, warps=warps)
            monkeypatch.setitem(table, name, chosen)
    kernel_plan.clear_plans()
    inputs = widths.draw(1, 41, 1, w)
    widths.compare(inputs, random_reset(1, 41).to(widths.DEVICE), widths.state_for(inputs))


@pytest.mark.parametrize("tile", [(128, 16, 2, 8), (32, 16, 3, 4)], ids=["whole block", "slices"])
def test_projection_tiles(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int, int, int]) -> None:
    """Input channels of a block in one program and in several; rows in parts."""
    monkeypatch.setitem(kernel_plan.PROJECTION_TILES, 128, tile)
    monkeypatch.setattr(kernel_plan, "multiprocessors", lambda _: 8)
    kernel_plan.clear_plans()
    widths.compare(widths.draw(2, 41, 1, 72), random_reset(2, 41).to(widths.DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    inputs = widths.draw(2, 70, 1, 128, dtype)
    widths.compare(inputs, random_reset(2, 70).to(widths.DEVICE), bounds=(eps, 2 * eps))
