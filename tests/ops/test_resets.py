"""Reset masks from what users of other libraries already have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.ops import reset_from_cu_seqlens, reset_from_position_ids


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from([1, 2, 3]))
@settings(max_examples=25, deadline=None)
def test_both_helpers_agree_with_a_loop(lengths: list[int], batch: int) -> None:
    lengths[-1] += -sum(lengths) % batch  # the rows must come out even
    total = sum(lengths)
    offsets, positions = [0], []
    for length in lengths:
        offsets.append(offsets[-1] + length)
        positions += range(length)
    expected = torch.zeros(total, dtype=torch.bool)
    for start, length in zip(offsets, lengths, strict=False):
        if length:
            expected[start] = True
    expected = expected.view(batch, total // batch)
    assert torch.equal(reset_from_cu_seqlens(torch.tensor(offsets, dtype=torch.int32), batch, total // batch), expected)
    position_ids = torch.tensor(positions, dtype=torch.int64).view(batch, total // batch)
    assert torch.equal(reset_from_position_ids(position_ids), expected)


def test_left_padding_leaves_the_reset_to_the_first_real_token() -> None:
    """Pads carry position 1; the first real token, not a pad, is at position 0."""
    reset = reset_from_position_ids(torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]]))
    assert reset.tolist() == [[False, False, True, False, False], [True, False, False, False, False]]


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 5, 4, 8]), "without falling"),
        (torch.tensor([0, 5]), r"batch\*length=8"),
        (torch.tensor([1, 8]), "from 0"),
        (torch.tensor([[0, 8]]), "shape"),
        (torch.tensor([], dtype=torch.int32), "shape"),
    ],
)
def test_bad_offsets(cu_seqlens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reset_from_cu_seqlens(cu_seqlens, 2, 4)


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens\.dtype=torch\.float32"):
        reset_from_cu_seqlens(torch.tensor([0.0, 8.0]), 2, 4)
    with pytest.raises(TypeError, match=r"position_ids\.dtype=torch\.bool"):
        reset_from_position_ids(torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"position_ids\.shape"):
        reset_from_position_ids(torch.arange(4))


def test_traced_without_a_graph_break() -> None:
    compiled = torch.compile(reset_from_cu_seqlens, fullgraph=True, backend="aot_eager")
    offsets = torch.tensor([0, 3, 3, 8])
    assert torch.equal(compiled(offsets, 2, 4), reset_from_cu_seqlens(offsets, 2, 4))
