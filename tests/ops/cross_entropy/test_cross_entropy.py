"""The cross entropy of logits that are thrown away: kernel (in the interpreter) and reference against PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from samu_lm.ops.cross_entropy import IGNORED, cross_entropy, kernel
from tests.ops.support import relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw(count: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(count, vocabulary)).to(dtype)
    labels = torch.randint(0, vocabulary, (count,))
    labels[::3] = IGNORED
    return logits, labels


def truth(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.double().requires_grad_()
    total = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    return total.detach(), torch.autograd.grad(total, wide)[0]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("count", "vocabulary"), [(1, 1), (5, 3), (7, 100), (2, 8192), (3, 8193), (2, 20000)])
def test_against_float64(count: int, vocabulary: int, backend: str) -> None:
    logits, labels = draw(count, vocabulary)
    labels[-1] = vocabulary - 1
    expected = truth(logits, labels)
    total, slope = cross_entropy(logits.clone(), labels, differentiate=True, backend=backend)
    assert slope is not None
    assert relative_error(total, expected[0]) < 1e-6 or float(expected[0]) == 0
    assert float((slope.double() - expected[1]).abs().max()) < 2e-6


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("rest", [1, 14, 9000])
def test_what_lies_behind_the_vocabulary_counts_nothing(rest: int, backend: str) -> None:
    logits, labels = draw(5, 50)
    expected = cross_entropy(logits.clone(), labels, differentiate=True, backend=backend)
    padded = torch.cat([logits, torch.full((5, rest), float("nan"))], 1)
    total, slope = cross_entropy(padded, labels, vocabulary=50, differentiate=True, backend=backend)
    assert slope is not None
    torch.testing.assert_close(total, expected[0])
    torch.testing.assert_close(slope[:, :50], expected[1])
    assert not slope[:, 50:].any()
    labels[1] = 50  # a label in the padding is out of range, too
    if backend == "triton":
        assert cross_entropy(padded, labels, vocabulary=50, differentiate=True, backend=backend)[0].isnan()
    for vocabulary in (0, 51 + rest):
        with pytest.raises(ValueError, match=f"vocabulary={vocabulary}: must be between 1 and the {50 + rest}"):
            cross_entropy(padded, labels, vocabulary=vocabulary, differentiate=True, backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    logits, labels = draw(6, 300, dtype)
    expected = truth(logits, labels)
    total, slope = cross_entropy(logits.clone(), labels, differentiate=True, backend="triton")
    assert slope is not None
    assert slope.dtype == dtype
    assert relative_error(total, expected[0]) < 1e-5
    assert relative_error(slope, expected[1]) < torch.finfo(dtype).eps


def test_the_gradient_takes_the_place_of_the_logits_only_where_asked() -> None:
    logits, labels = draw(4, 50)
    before = logits.clone()
    assert cross_entropy(logits, labels, differentiate=False, backend="triton")[1] is None
    assert torch.equal(logits, before)
    _, slope = cross_entropy(logits, labels, differentiate=True, backend="triton")
    assert slope is not None
    assert slope.data_ptr() == logits.data_ptr()


def test_extreme_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [float("-inf"), 1.0, 1.0]])
    labels = torch.tensor([0, 1, 2])
    total, slope = cross_entropy(logits.clone(), labels, differentiate=True, backend="triton")
    assert float(total) == pytest.approx(math.log(3) + math.log(2), rel=1e-6)
    assert slope is not None
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("label", [-1, 50, 10**9])
def test_a_label_out_of_range_is_no_number(label: int) -> None:
    logits, labels = draw(4, 50)
    labels[1] = label
    assert cross_entropy(logits, labels, differentiate=True, backend="triton")[0].isnan()
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(draw(4, 50)[0], labels, differentiate=True, backend="reference")


def test_nothing_that_is_no_number_is_hidden() -> None:
    logits, labels = draw(4, 50)
    logits[1, 7] = float("nan")
    assert cross_entropy(logits, labels, differentiate=False, backend="triton")[0].isnan()


def test_no_tokens() -> None:
    total, slope = cross_entropy(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), differentiate=True)
    assert float(total) == 0
    assert slope is not None
    total, _ = cross_entropy(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), differentiate=True, backend="triton")
    assert float(total) == 0


def test_registration() -> None:
    logits, labels = draw(4, 50)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernel._losses, (logits, labels, logits.shape[1], True), test_utils=tests)
