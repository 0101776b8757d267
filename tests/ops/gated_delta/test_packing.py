"""Nothing crosses a reset in the gated delta rule, and a row can be cut anywhere: properties over random documents."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samu_lm.ops import gated_delta_rule
from tests.ops.gated_delta.oracle import draw
from tests.ops.support import random_reset, relative_error, reset_of_lengths

by_implementation = pytest.mark.parametrize("implementation", ["recurrent", "chunked", "chunked_fat"])
HEADS, DK, DV = 2, 8, 4


def _run(
    inputs: dict[str, Tensor],
    implementation: str,
    reset: Tensor | None,
    cotangent: Tensor,
    state: Tensor | None = None,
    chunk_size: int = 16,
) -> dict[str, Tensor]:
    """o and the gradients of all per-token inputs."""
    call = {"implementation": implementation, "chunk_size": chunk_size}
    o, _ = gated_delta_rule(**inputs, reset=reset, initial_state=state, **call)
    return {"o": o, **dict(zip(inputs, torch.autograd.grad(o, list(inputs.values()), cotangent), strict=True))}


def _part(inputs: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: x[:, start:stop].detach().clone().requires_grad_() for name, x in inputs.items()}


@by_implementation
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), seed=st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_packed_equals_alone(implementation: str, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    inputs = draw(1, sum(lengths), HEADS, DK, DV)
    cotangent = torch.randn(1, sum(lengths), HEADS, DV)
    packed = _run(inputs, implementation, reset_of_lengths(lengths), cotangent)
    start = 0
    for length in lengths:
        stop = start + length
        alone = _run(_part(inputs, start, stop), implementation, None, cotangent[:, start:stop])
        for name, value in alone.items():
            # The gradient of a row's first log_alpha is exactly 0 with and without a reset.
            assert relative_error(packed[name][:, start:stop], value) < 2e-6, f"{name} of tokens {start}..{stop}"
        start = stop


@by_implementation
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6), data=st.data())
@settings(max_examples=15, deadline=None)
def test_leak_probe(implementation: str, lengths: list[int], data: st.DataObject) -> None:
    """Changing one document, even to infinity or NaN, changes no bit of another's outputs and gradients."""
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    victim = data.draw(st.integers(0, len(lengths) - 1), label="changed document")
    poison = data.draw(st.sampled_from([1.0, 1e30, float("inf"), float("nan")]), label="change")
    start = sum(lengths[:victim])
    stop = start + lengths[victim]
    inputs = draw(1, sum(lengths), HEADS, DK, DV)
    changed = {name: x.detach().clone() for name, x in inputs.items()}
    for name in changed:
        changed[name][:, start:stop] += poison
    cotangent, reset = torch.randn(1, sum(lengths), HEADS, DV), reset_of_lengths(lengths)
    chunk_size = data.draw(st.sampled_from([16, 64, 128]), label="chunk_size")
    before = _run(inputs, implementation, reset, cotangent, None, chunk_size)
    changed = {name: x.requires_grad_() for name, x in changed.items()}
    after = _run(changed, implementation, reset, cotangent, None, chunk_size)
    outside = torch.ones(sum(lengths), dtype=torch.bool)
    outside[start:stop] = False
    for name, value in before.items():
        assert torch.equal(value[:, outside], after[name][:, outside]), f"{name} outside tokens {start}..{stop} changed"
    assert not torch.equal(before["o"][:, ~outside], after["o"][:, ~outside]), "the probe changed nothing at all"


@by_implementation
@pytest.mark.parametrize("boundary", [1, 16, 20, 33])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_on_its_side_of_a_dropped_state(
    implementation: str, boundary: int, with_state: bool, poison: float
) -> None:
    """A log_alpha of -inf is a reset of one head for infinities and NaN, too; there need be no other boundary."""
    inputs = draw(1, 70, HEADS, DK, DV)
    state = torch.randn(1, HEADS, DK, DV) if with_state else None
    cotangent = torch.randn(1, 70, HEADS, DV)
    with torch.no_grad():
        inputs["log_alpha"][:, boundary, 0] = -torch.inf
    before = _run(inputs, implementation, None, cotangent, state)
    for token, other in ((boundary - 1, slice(boundary, 70)), (boundary, slice(0, boundary))):
        changed = {name: x.detach().clone() for name, x in inputs.items()}
        changed["v"][:, token, 0, 0] = poison
        after = _run({name: x.requires_grad_() for name, x in changed.items()}, implementation, None, cotangent, state)
        assert not after["o"][:, token, 0].isfinite().all()
        for name, value in before.items():
            assert torch.equal(value[:, other], after[name][:, other]), name
            assert torch.equal(value[:, :, 1], after[name][:, :, 1]), name


@by_implementation
@pytest.mark.parametrize("boundary", [1, 15, 16, 17, 31, 32, 33, 63])
def test_no_gradient_across_a_boundary(implementation: str, boundary: int) -> None:
    inputs = draw(1, 64, HEADS, DK, DV)
    o, state = gated_delta_rule(
        **inputs, reset=reset_of_lengths([boundary, 64 - boundary]), output_final_state=True,
        implementation=implementation, chunk_size=16,
    )  # fmt: skip
    assert state is not None
    grad = torch.autograd.grad(o[:, boundary:].sum() + state.sum(), inputs["v"])[0]
    assert not grad[:, :boundary].any()
    assert grad[:, boundary:].any()


@by_implementation
def test_a_state_is_dropped_at_a_marked_first_token(implementation: str) -> None:
    inputs = draw(2, 40, HEADS, DK, DV)
    reset, cotangent = random_reset(2, 40), torch.randn(2, 40, HEADS, DV)
    poisoned = torch.full((2, HEADS, DK, DV), float("nan"))
    plain = _run(inputs, implementation, reset, cotangent)
    for name, value in _run(inputs, implementation, reset, cotangent, poisoned).items():
        assert torch.equal(value, plain[name]), name
    unmarked = reset.clone()
    unmarked[:, 0] = False
    assert torch.equal(_run(inputs, implementation, unmarked, cotangent)["o"], plain["o"])


@by_implementation
@given(cuts=st.lists(st.integers(0, 70), max_size=4), seed=st.integers(0, 999))
@settings(max_examples=10, deadline=None)
def test_prefill_at_any_split(implementation: str, cuts: list[int], seed: int) -> None:
    """Whole, in parts and token by token: the same outputs and final state."""
    torch.manual_seed(seed)
    inputs = {name: x.detach() for name, x in draw(2, 70, HEADS, DK, DV).items()}
    reset, first_state = random_reset(2, 70, 0.05), torch.randn(2, HEADS, DK, DV)
    reset[:, 0] = False
    call = {"output_final_state": True, "implementation": implementation, "chunk_size": 16}
    whole, end = gated_delta_rule(**inputs, reset=reset, initial_state=first_state, **call)
    assert end is not None
    for edges in ([0, *sorted(cuts), 70], list(range(71))):
        state, outputs = first_state, []
        for start, stop in itertools.pairwise(edges):
            part = {name: x[:, start:stop] for name, x in inputs.items()}
            o, after = gated_delta_rule(**part, reset=reset[:, start:stop], initial_state=state, **call)
            assert after is not None
            state = after
            outputs.append(o)
        assert relative_error(torch.cat(outputs, 1), whole) < 1e-6
        assert relative_error(state, end) < 1e-6
