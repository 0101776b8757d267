"""The reference backend against the float64 loops: every op, outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch

from samu_lm.ops import samu_controls
from tests.ops.samu.oracle import controls
from tests.ops.support import CASES, RGLRU_CASE, SAMU_CASE, OpCase, compare_with_loop, random_reset, relative_error

by_op = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@by_op
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("resets", [False, True], ids=["one document", "packed"])
def test_short_lengths(case: OpCase, with_state: bool, resets: bool) -> None:
    for length in [*range(1, 20), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 130]:
        reset = random_reset(2, length) if resets else None
        compare_with_loop(case, 2, length, 6, reset=reset, with_state=with_state)


@by_op
@pytest.mark.parametrize(("batch", "length", "width"), [(1, 1000, 32), (1, 4097, 64), (33, 96, 130)])
def test_long_lengths(case: OpCase, batch: int, length: int, width: int) -> None:
    compare_with_loop(case, batch, length, width, reset=random_reset(batch, length, 0.01), with_state=True)


@by_op
@pytest.mark.parametrize("length", [0, 1, 2, 3, 300])
def test_split_anywhere(case: OpCase, length: int) -> None:
    """A state carries the row on: two calls give what one gives, with tokens 0 to 300 in the first."""
    inputs = case.draw(2, 300, 8)
    reset = random_reset(2, 300, 0.02)
    whole, whole_state = case.run(inputs, reset)
    head = {k: v[:, :length] if k in case.per_token else v for k, v in inputs.items()}
    tail = {k: v[:, length:] if k in case.per_token else v for k, v in inputs.items()}
    first, state = case.run(head, reset[:, :length])
    second, final_state = case.run(tail, reset[:, length:], state)
    assert relative_error(torch.cat([first, second], 1), whole) < 2e-6
    assert relative_error(final_state, whole_state) < 2e-6


@by_op
def test_no_rows(case: OpCase) -> None:
    inputs = {k: v.requires_grad_() for k, v in case.draw(0, 7, 6).items()}
    y, state = case.run(inputs)
    assert y.shape == (0, 7, 6)
    assert state.shape == case.state_shape(0, 6)
    (y.sum() + state.sum()).backward()
    assert inputs["x"].grad is not None


@by_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: OpCase, dtype: torch.dtype) -> None:
    """Half-precision activations: exact inputs, float32 inside, one rounding at the output."""
    inputs = case.draw(2, 200, 16)
    inputs["x"] = inputs["x"].to(dtype)
    reset = random_reset(2, 200, 0.05)
    y, state = case.run(inputs, reset)
    expected, expected_state = case.run_loop(inputs, reset)
    assert y.dtype == dtype
    assert relative_error(y, expected) < torch.finfo(dtype).eps
    bound = 2e-6 if case.name != "causal_conv1d" else 0.0  # a convolution's state is its inputs
    assert relative_error(state, expected_state) <= bound
    if case.name != "causal_conv1d":
        assert state.dtype == torch.float32


@by_op
def test_not_contiguous(case: OpCase) -> None:
    inputs = case.draw(2, 40, 8)
    strided = {k: v.transpose(-1, -2).contiguous().transpose(-1, -2) if v.dim() == 3 else v for k, v in inputs.items()}
    assert not strided["x"].is_contiguous()
    assert relative_error(case.run(strided)[0], case.run(inputs)[0]) < 1e-6


@by_op
def test_deterministic(case: OpCase) -> None:
    inputs = {k: v.requires_grad_() for k, v in case.draw(3, 130, 16).items()}
    runs = []
    for _ in range(2):
        y, _ = case.run(inputs, random_reset(3, 130, 0.0))
        runs.append([y, *torch.autograd.grad(y.square().sum(), list(inputs.values()))])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("magnitude", [20.0, 100.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_gates_stay_finite(magnitude: float, sign: int) -> None:
    """65,536 tokens with gates driven to their ends: radii at exactly 0 and 1, finite outputs and gradients."""
    length = 65536
    rglru = {k: v.requires_grad_() for k, v in RGLRU_CASE.draw(1, length, 4).items()}
    logits = torch.full((1, length, 4), sign * magnitude)
    logits[..., ::2] *= -1
    with torch.no_grad():
        rglru["a_gate_logits"].copy_(logits)
        rglru["input_gate_logits"].copy_(-logits)
        rglru["a_param"].copy_(torch.tensor([magnitude, -magnitude, 0.0, -20.0]))
    samu = {k: v.requires_grad_() for k, v in SAMU_CASE.draw(1, length, 8).items()}
    with torch.no_grad():
        samu["eta"].fill_(sign * magnitude)
        samu["delta"].fill_(sign * magnitude)
        samu["nu_log"].copy_(torch.tensor([magnitude, -magnitude, -1000.0, 1000.0]))
    for case, inputs in ((RGLRU_CASE, rglru), (SAMU_CASE, samu)):
        y, state = case.run(inputs)
        grads = torch.autograd.grad(y.sum() + state.sum(), list(inputs.values()))
        for name, tensor in zip(["y", *inputs], [y, *grads], strict=True):
            assert torch.isfinite(tensor).all(), f"{case.name}: {name} is not finite"


def test_radius_near_one_keeps_its_state() -> None:
    """A decay of 1e-4 per token, bfloat16 inputs: after 10,000 tokens e^-1 of the first input is still there."""
    length, width = 10_000, 4
    x = torch.zeros(1, length, width, dtype=torch.bfloat16)
    x[:, 0] = 1
    logits = torch.full((1, length, width), 40.0, dtype=torch.bfloat16)
    a_param = torch.full((width,), float(torch.tensor(1e-4 / 8, dtype=torch.float64).expm1().log()))
    _, state = RGLRU_CASE.run({"x": x, "input_gate_logits": logits, "a_gate_logits": logits, "a_param": a_param})
    torch.testing.assert_close(state, torch.full((1, width), 0.367915), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_controls(dtype: torch.dtype) -> None:
    width = 24
    x = torch.randn(2, 50, width).to(dtype).requires_grad_()
    parameters = [torch.randn(width + 1), torch.randn(width + 1), torch.tensor(0.7), torch.tensor(-1.3)]
    leaves = [x, *(p.requires_grad_() for p in parameters)]
    actual, expected = samu_controls(*leaves), controls(*leaves)
    # Cotangents of the values' own signs: no sum cancels, so that a relative bound says something.
    cotangents = [torch.rand(2, 50) * value.detach().sign() for value in actual]
    tolerance = 5e-6 if dtype == torch.float32 else 8e-3
    for value, truth in zip(actual, expected, strict=True):
        assert value.dtype == torch.float32
        assert relative_error(value, truth) < 2e-6
    grads = [
        torch.autograd.grad(sum((v * c.to(v.dtype)).sum() for v, c in zip(pair, cotangents, strict=True)), leaves)
        for pair in (actual, expected)
    ]
    for value, truth in zip(*grads, strict=True):
        assert relative_error(value, truth) < tolerance


def test_controls_are_float32_under_autocast() -> None:
    width = 64
    x = torch.randn(1, 30, width)
    parameters = (torch.randn(width + 1), torch.randn(width + 1), torch.tensor(0.5), torch.tensor(0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = samu_controls(x, *parameters)
    for value, plain in zip(under, samu_controls(x, *parameters), strict=True):
        assert torch.equal(value, plain)


def test_amplitudes_at_zero_fix_the_recurrence_yet_receive_gradient() -> None:
    width = 16
    x = torch.randn(2, 20, width)
    phase, radial = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
    eta, delta = samu_controls(x, torch.randn(width + 1), torch.randn(width + 1), phase, radial)
    assert not eta.any()
    assert not delta.any()
    (eta.sum() + delta.sum()).backward()
    assert phase.grad is not None
    assert radial.grad is not None
    assert phase.grad != 0
    assert radial.grad != 0
