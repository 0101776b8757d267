"""Rows that lie more than 2^31 elements into their tensor: offsets are 64 bits wide.

The memory between the rows is reserved but never touched. tests/gpu has whole tensors of that size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.ops import causal_conv1d, rglru_mixer, samu_mixer
from samu_lm.ops.samu.kernel_plan import Plan, use_plan
from tests.ops.rglru.test_kernel import GATES
from tests.ops.rglru.test_kernel import draw as draw_rglru
from tests.ops.samu.test_kernel import draw as draw_samu


def far_apart(x: Tensor) -> Tensor:
    """The same values, row 1 beginning 2^31 + 8 elements behind row 0."""
    batch, length, width = x.shape
    assert batch == 2
    storage = torch.empty(2**31 + 8 + length * width, dtype=x.dtype, device=x.device)
    far = storage.as_strided(x.shape, (2**31 + 8, width, 1))
    return far.copy_(x).requires_grad_()


def outputs_and_gradients(name: str, x: Tensor, inputs: dict[str, Tensor], reset: Tensor) -> list[Tensor]:
    rest = {key: value for key, value in inputs.items() if key != "x"}
    op = {"samu": samu_mixer, "rglru": rglru_mixer, "causal_conv1d": causal_conv1d}[name]
    with use_plan(Plan(chunk=16, group=8, block=16, gradient_block=16)):
        y, _ = op(x, **rest, reset=reset, backend="triton")  # type: ignore[operator]
        return [y, *torch.autograd.grad(y, [x, *rest.values()], torch.ones_like(y))]


@pytest.mark.parametrize("name", ["samu", "rglru", "causal_conv1d"])
def test_far_rows(name: str) -> None:
    if name == "samu":
        inputs = draw_samu(2, 20, 8, torch.float16)
    elif name == "rglru":
        drawn = draw_rglru(2, 20, 1, 16, torch.float16)
        inputs = {key: drawn[key] for key in ("x", *GATES)}
    else:
        x = draw_samu(2, 20, 8, torch.float16)["x"]
        inputs = {"x": x, "weight": torch.randn(8, 4).to(x.device), "bias": torch.randn(8).to(x.device)}
        inputs = {key: value.requires_grad_() for key, value in inputs.items()}
    reset = torch.zeros(2, 20, dtype=torch.bool, device=inputs["x"].device)
    reset[1, 7] = True
    near = outputs_and_gradients(name, inputs["x"], inputs, reset)
    far = outputs_and_gradients(name, far_apart(inputs["x"].detach()), inputs, reset)
    for one, other in zip(near, far, strict=True):
        assert torch.equal(one, other)
