"""Nothing crosses a reset: property tests over random documents, for every op and backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.support import CASES, OpCase, random_reset, relative_error, reset_of_lengths

by_op = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
document_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def _gradients(case: OpCase, inputs: dict[str, Tensor], reset: Tensor | None, cotangent: Tensor) -> list[Tensor]:
    y, _ = case.run(inputs, reset)
    grads = torch.autograd.grad((y * cotangent).sum(), list(inputs.values()), allow_unused=True)
    return [y, *(torch.zeros_like(i) if g is None else g for g, i in zip(grads, inputs.values(), strict=True))]


def _slice(case: OpCase, inputs: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {
        name: (t[:, start:stop] if name in case.per_token else t).detach().clone().requires_grad_()
        for name, t in inputs.items()
    }


@by_op
@given(lengths=document_lengths, seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_packed_equals_alone(case: OpCase, lengths: list[int], seed: int) -> None:
    """Outputs and every gradient of packed documents are those of each document run alone."""
    torch.manual_seed(seed)
    total = sum(lengths)
    inputs = _slice(case, case.draw(1, total, 8), 0, total)
    cotangent = torch.randn(1, total, 8)
    packed = dict(zip(["y", *inputs], _gradients(case, inputs, reset_of_lengths(lengths), cotangent), strict=True))
    sums = {name: torch.zeros_like(inputs[name]) for name in case.parameters}
    start = 0
    for length in lengths:
        stop = start + length
        alone = _gradients(case, _slice(case, inputs, start, stop), None, cotangent[:, start:stop])
        for name, value in zip(["y", *inputs], alone, strict=True):
            if name in case.parameters:
                sums[name] += value
            else:
                bound = 2e-6 if value.dim() == 3 else 1e-5  # a control's gradient is a sum over modes, and may cancel
                assert relative_error(packed[name][:, start:stop], value) < bound, f"{name} of tokens {start}..{stop}"
        start = stop
    for name, value in sums.items():
        assert relative_error(packed[name], value) < 2e-5, name


@by_op
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6), data=st.data())
@settings(max_examples=25, deadline=None)
def test_leak_probe(case: OpCase, lengths: list[int], data: st.DataObject) -> None:
    """Changing one document, even to infinity or NaN, changes no bit of another's outputs and gradients."""
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    victim = data.draw(st.integers(0, len(lengths) - 1), label="changed document")
    poison = data.draw(st.sampled_from([1.0, 1e30, float("inf"), float("nan")]), label="change")
    total, start = sum(lengths), sum(lengths[:victim])
    stop = start + lengths[victim]
    inputs = _slice(case, case.draw(1, total, 8), 0, total)
    changed = {name: t.detach().clone() for name, t in inputs.items()}
    for name in case.per_token:
        changed[name][:, start:stop] += poison
    changed = {name: t.requires_grad_() for name, t in changed.items()}
    cotangent, reset = torch.randn(1, total, 8), reset_of_lengths(lengths)
    before, after = _gradients(case, inputs, reset, cotangent), _gradients(case, changed, reset, cotangent)
    outside = torch.ones(total, dtype=torch.bool)
    outside[start:stop] = False
    for name, one, other in zip(["y", *inputs], before, after, strict=True):
        if name not in case.parameters:
            assert torch.equal(one[:, outside], other[:, outside]), f"{name} outside tokens {start}..{stop} changed"
    assert not torch.equal(before[0][:, ~outside], after[0][:, ~outside]), "the probe changed nothing at all"


@by_op
@pytest.mark.parametrize("boundary", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255])
def test_no_gradient_across_a_boundary(case: OpCase, boundary: int) -> None:
    """Boundaries on and off the scan's own block edges: the loss of B has no gradient in A, and reads nothing of it."""
    inputs = _slice(case, case.draw(1, 256, 8), 0, 256)
    reset = reset_of_lengths([boundary, 256 - boundary])
    y, state = case.run(inputs, reset)
    grad = torch.autograd.grad(y[:, boundary:].sum() + state.sum(), inputs["x"])[0]
    assert not grad[:, :boundary].any()
    assert grad[:, boundary:].any()


@by_op
def test_one_two_and_three_token_documents_in_a_row(case: OpCase) -> None:
    from tests.ops.support import compare_with_loop

    compare_with_loop(case, 1, 17, 8, reset=reset_of_lengths([1, 1, 2, 3, 1, 3, 2, 2, 1, 1]), tolerance=2e-6)


@by_op
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_row_without_a_state_starts_a_document(case: OpCase, backend: str) -> None:
    """Nothing precedes a fresh row: whether its first token is marked makes no difference, to gradients neither."""
    inputs = {name: t.requires_grad_() for name, t in case.draw(2, 30, 8).items()}
    marked = random_reset(2, 30)
    unmarked = marked.clone()
    unmarked[:, 0] = False
    results = []
    for reset in (marked, unmarked):
        y, final = case.run(inputs, reset, backend=backend)
        results.append([y, final, *torch.autograd.grad(y.sum() + final.sum(), list(inputs.values()))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@by_op
def test_a_state_is_dropped_at_a_marked_first_token(case: OpCase) -> None:
    inputs = case.draw(2, 30, 8)
    reset = random_reset(2, 30)
    poisoned = torch.full(case.state_shape(2, 8), float("nan"))
    assert torch.equal(case.run(inputs, reset, poisoned)[0], case.run(inputs, reset)[0])
