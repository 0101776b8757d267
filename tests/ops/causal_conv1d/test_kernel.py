"""The convolution's Triton kernels, in the interpreter on a CPU, against the loop over tokens and taps."""

from __future__ import annotations

import pytest
import torch

from samu_lm.ops import causal_conv1d
from samu_lm.ops.common.launch import count_launches
from tests.ops.causal_conv1d.oracle import conv_loop
from tests.ops.support import CONV_CASE, compare_with_loop, gradients, random_reset, relative_error, reset_of_lengths

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("resets", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 40])
def test_against_the_loop(length: int, resets: bool, with_state: bool) -> None:
    reset = random_reset(2, length, 0.3) if resets else None
    compare_with_loop(CONV_CASE, 2, length, 6, reset=reset, with_state=with_state, tolerance=2e-6, backend="triton")


def test_documents_of_one_to_three_tokens() -> None:
    reset = reset_of_lengths([1, 1, 2, 3, 1, 3, 2, 2, 1, 1])
    compare_with_loop(CONV_CASE, 1, 17, 34, reset=reset, tolerance=2e-6, backend="triton")


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_any_number_of_taps(taps: int) -> None:
    x, weight, bias = torch.randn(1, 20, 6), torch.randn(6, taps), torch.randn(6)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    reset = random_reset(1, 20, 0.2)
    actual = causal_conv1d(*leaves, reset=reset, output_final_state=True, backend="triton")
    expected = conv_loop(*leaves, reset=reset)
    cotangents = (torch.randn(1, 20, 6), torch.randn(1, taps - 1, 6))
    pairs = zip(
        (actual[0], *gradients(actual, leaves, cotangents)),  # type: ignore[arg-type]
        (expected[0], *gradients(expected, leaves, cotangents)),
        strict=True,
    )
    for value, truth in pairs:
        assert relative_error(value, truth) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    inputs = CONV_CASE.draw(1, 30, 40)
    inputs["x"] = inputs["x"].to(dtype)
    y, state = CONV_CASE.run(inputs, backend="triton")
    expected, expected_state = CONV_CASE.run_loop(inputs)
    assert y.dtype == state.dtype == dtype
    assert relative_error(y, expected) < torch.finfo(dtype).eps
    assert torch.equal(state.double(), expected_state)


def test_infinity_stays_in_its_document() -> None:
    inputs = CONV_CASE.draw(1, 30, 6)
    reset = reset_of_lengths([10, 9, 11])
    changed = {**inputs, "x": inputs["x"].clone()}
    changed["x"][:, 10:19] = float("inf")
    before, after = (CONV_CASE.run(i, reset, backend="triton")[0] for i in (inputs, changed))
    assert torch.equal(before[:, :10], after[:, :10])
    assert torch.equal(before[:, 19:], after[:, 19:])


def test_launches_and_registration() -> None:
    from samu_lm.ops.causal_conv1d import kernel

    leaves = [t.requires_grad_() for t in CONV_CASE.draw(1, 20, 6).values()]
    with count_launches() as names:
        causal_conv1d(*leaves, backend="triton")[0].sum().backward()
    assert names == ["conv_kernel", "conv_gradients_kernel", "conv_parameters_kernel"]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel._conv, (*leaves, None, None), test_utils=tests)
