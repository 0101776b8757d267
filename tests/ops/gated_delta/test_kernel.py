"""The gated delta rule's Triton kernels in the interpreter: the loop's values, documents apart, every byte written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.ops import gated_delta_rule
from samu_lm.ops.common.launch import count_launches
from samu_lm.ops.gated_delta import kernel
from tests.ops.gated_delta.oracle import NAMES, compare, delta_loop, draw
from tests.ops.support import random_reset, relative_error, reset_of_lengths


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("batch", "length", "heads", "dk", "dv", "chunk_size", "resets", "with_state"),
    [
        (1, 1, 1, 16, 16, 64, False, True),
        (2, 33, 2, 16, 16, 16, False, False),
        (1, 50, 2, 8, 40, 16, True, True),
        (2, 70, 1, 20, 24, 32, True, False),
        (1, 70, 1, 16, 8, 64, True, True),
        (1, 130, 1, 8, 8, 128, True, False),
    ],
)
def test_against_the_loop(
    batch: int, length: int, heads: int, dk: int, dv: int, chunk_size: int, resets: bool, with_state: bool
) -> None:
    inputs = draw(batch, length, heads, dk, dv)
    reset = random_reset(batch, length, 0.06) if resets else None
    if reset is not None and with_state:
        reset[:, 0] = False
    state = torch.randn(batch, heads, dk, dv).requires_grad_() if with_state else None
    compare(inputs, reset, state, implementation="ssd", chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """Products in the inputs' type (the interpreter truncates bfloat16), states and sums in float32."""
    inputs = draw(1, 40, 1, 16, 16, dtype)
    o, state = gated_delta_rule(**inputs, output_final_state=True, implementation="ssd", chunk_size=16)
    expected = delta_loop(**inputs)
    eps = torch.finfo(dtype).eps
    assert o.dtype == dtype and state is not None and state.dtype == torch.float32
    assert relative_error(o, expected[0]) < 2 * eps
    assert relative_error(state, expected[1]) < 2 * eps
    cotangent = torch.randn_like(o)
    grads = torch.autograd.grad(o, list(inputs.values()), cotangent)
    truths = torch.autograd.grad(expected[0], list(inputs.values()), cotangent.double())
    for name, grad, truth in zip(NAMES, grads, truths, strict=True):
        assert relative_error(grad, truth) < 4 * eps, name


def _run(inputs: dict[str, Tensor], reset: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, state = gated_delta_rule(**leaves, reset=reset, output_final_state=True, implementation="ssd", chunk_size=16)
    assert state is not None
    grads = torch.autograd.grad((o, state.sum()), list(leaves.values()), (cotangent, torch.ones(())))
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("poison", [1.0, float("inf"), float("nan")])
def test_leak_probe(poison: float) -> None:
    """Changing one document, even to infinity or NaN, changes no bit of another; its own results say so."""
    lengths = [5, 11, 4]
    inputs, reset = draw(1, sum(lengths), 1, 8, 8), reset_of_lengths(lengths)
    cotangent = torch.randn(1, sum(lengths), 1, 8)
    before = _run(inputs, reset, cotangent)
    for victim, names in enumerate((NAMES, NAMES[:3], NAMES[3:])):
        start = sum(lengths[:victim])
        stop = start + lengths[victim]
        changed = {n: x.detach().clone() for n, x in inputs.items()}
        for name in names:
            changed[name][:, stop - 1] += poison
        after = _run(changed, reset, cotangent)
        outside = torch.ones(sum(lengths), dtype=torch.bool)
        outside[start:stop] = False
        for part, value in before.items():
            assert torch.equal(value[:, outside], after[part][:, outside]), (victim, part)
            if poison != 1:
                assert after[part][:, start:stop].isnan().any(), (victim, part)


def test_what_is_not_finite_stays_on_its_side_of_a_dropped_state() -> None:
    """In a call with resets, a log_alpha of -inf is one of them for its head."""
    inputs, reset = draw(1, 30, 1, 8, 8), reset_of_lengths([9, 21])
    with torch.no_grad():
        inputs["log_alpha"][:, 20] = -torch.inf
    cotangent = torch.randn(1, 30, 1, 8)
    before = _run(inputs, reset, cotangent)
    changed = {name: x.detach().clone() for name, x in inputs.items()}
    changed["v"][:, 12] = torch.inf
    after = _run(changed, reset, cotangent)
    for name, value in before.items():
        assert torch.equal(value[:, 20:], after[name][:, 20:]), name
    assert after["o"][:, 12:20].isnan().all()


def test_a_state_or_gradient_that_is_not_finite_stays_in_its_document() -> None:
    inputs, reset = draw(1, 30, 1, 8, 8), reset_of_lengths([7, 23])
    reset[:, 0] = False
    results = []
    for value in (0.0, float("nan")):
        leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
        state = torch.full((1, 1, 8, 8), value).requires_grad_()
        o, _ = gated_delta_rule(*leaves, reset=reset, initial_state=state, implementation="ssd", chunk_size=16)
        cotangent = torch.ones_like(o)
        cotangent[:, 3] = value
        results.append((o, *torch.autograd.grad(o, [*leaves, state], cotangent)))
    for clean, spoilt in zip(*[r[:-1] for r in results], strict=True):
        assert torch.equal(clean[:, 7:], spoilt[:, 7:])
        assert spoilt[:, :7].isnan().all()
    assert results[1][-1].isnan().all()


def test_launches() -> None:
    inputs = draw(1, 40, 1, 16, 16)
    with count_launches() as names:
        gated_delta_rule(**inputs, implementation="ssd", chunk_size=16)[0].sum().backward()
    assert len(names) == 6, names


@pytest.mark.parametrize("with_mask", [False, True])
def test_registration(with_mask: bool) -> None:
    inputs = draw(1, 20, 1, 16, 16)
    reset = random_reset(1, 20) if with_mask else None
    state = None if with_mask else torch.randn(1, 1, 16, 16).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel._forward, (*inputs.values(), reset, state, 16), test_utils=tests)


def test_what_the_kernels_take() -> None:
    with pytest.raises(TypeError, match=r"q\.dtype=torch\.float64"):
        gated_delta_rule(**draw(1, 3, 1, 8, 8, torch.float64), implementation="ssd")
    with pytest.raises(ValueError, match=r"q\.shape\[-1\]=160: implementation='ssd' takes at most 128"):
        gated_delta_rule(**draw(1, 3, 1, 160, 8), implementation="ssd")
