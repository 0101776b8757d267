"""The convolution on a GPU: its compiled walk over pieces with and without first tokens, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.ops import causal_conv1d
from tests.ops.support import relative_error


def run(leaves: list[Tensor], reset: Tensor | None, backend: str, cotangents: list[Tensor]) -> list[Tensor]:
    """y, the final state and every gradient; of NaNs where memory was left unwritten."""
    poison = [torch.full((2 * leaves[0].numel(),), float("nan"), device="cuda") for _ in range(3)]
    del poison
    x, weight, bias, state = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    done = causal_conv1d(x, weight, bias, reset=reset, initial_state=state, output_final_state=True, backend=backend)
    grads = torch.autograd.grad(done, (x, weight, bias, state), [c.to(done[0].dtype) for c in cotangents])
    return [*done, *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 7, 8, 255, 256, 257, 4096, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_the_definition_in_float64(dtype: torch.dtype, length: int, rate: float) -> None:
    """Pieces with first tokens, none, all; chunks of every length that the plan has."""
    width = 256
    generator = torch.Generator("cuda").manual_seed(length)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    leaves = [draw(2, length, width).to(dtype), draw(width, 4), draw(width), draw(2, 3, width).to(dtype)]
    cotangents = [draw(2, length, width).to(dtype), draw(2, 3, width).to(dtype)]
    reset = torch.rand((2, length), generator=generator, device="cuda") < rate if rate else None
    results = run(leaves, reset, "triton", cotangents)
    again = run(leaves, reset, "triton", cotangents)
    expected = run([leaf.double() for leaf in leaves], reset, "reference", cotangents)
    names = ("y", "final state", "x", "weight", "bias", "initial state")
    for name, value, second, truth in zip(names, results, again, expected, strict=True):
        assert torch.equal(value, second), name
        rounded = dtype != torch.float32 and name not in ("weight", "bias")
        assert relative_error(value, truth) < (torch.finfo(dtype).eps if rounded else 5e-6), name
