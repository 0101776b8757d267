"""The gated delta rule's kernels on a GPU, at sizes the interpreter cannot reach, against ``chunked`` in float64."""

from __future__ import annotations

import pytest
import torch

from samu_lm.ops import gated_delta_rule
from tests.ops.support import random_reset, relative_error


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("with_reset", [False, True])
def test_against_float64(dtype: torch.dtype, bound: float, chunk_size: int, with_reset: bool) -> None:
    batch, length, heads, d = 2, 1000, 4, 128
    q, k = (torch.nn.functional.normalize(torch.randn(batch, length, heads, d), dim=-1) for _ in range(2))
    gates = -0.1 * torch.rand(batch, length, heads), torch.rand(batch, length, heads)
    inputs = [x.to(dtype) for x in (q, k, torch.randn(batch, length, heads, d))] + list(gates)
    reset = random_reset(batch, length, 0.01).cuda() if with_reset else None
    results = []
    for implementation, kind in (("ssd", None), ("chunked", torch.float64)):
        leaves = [x.cuda().to(kind or x.dtype).requires_grad_() for x in inputs]
        o, state = gated_delta_rule(
            *leaves, reset=reset, output_final_state=True, implementation=implementation, chunk_size=chunk_size
        )
        assert state is not None
        results.append([o, state, *torch.autograd.grad(o.double().sin().sum() + state.double().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < bound
