import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.data.best_fit import BestFitPlan, best_fit

PAD = 9999
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40)


def best_fit_piece_by_piece(lengths, capacity):
    """The rule as it is written, one piece at a time: the contents' lengths of each row, sorted."""
    rows = []
    for length in sorted((n for n in lengths if n), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return sorted(rows)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=60), capacity=st.integers(12, 20))
def test_rows_are_those_of_best_fit_decreasing(lengths, capacity):
    rows, count = best_fit(np.bincount(np.array(lengths, dtype=np.int64), minlength=capacity + 1), capacity)
    contents = [[] for _ in range(count)]
    for row, length in zip(rows, sorted(lengths, reverse=True), strict=True):
        contents[row].append(length)
    # Rows equally full are alike to the rule, so which of them takes a piece may differ; their fill may not.
    assert sorted(map(sum, contents)) == sorted(map(sum, best_fit_piece_by_piece(lengths, capacity)))
    assert all(0 < sum(row) <= capacity for row in contents)


def corpus(lengths):
    """Tokens that are all different, and the offsets."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(offsets[-1], dtype=np.uint16), offsets


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 16), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_token_once_no_short_document_cut_and_no_target_lost(lengths, seq_len, seed, epoch):
    tokens, offsets = corpus(lengths)
    plan = BestFitPlan.build(offsets, np.arange(len(lengths)), seq_len).shuffled(seed, epoch)
    batch = plan.rows(tokens, 0, plan.num_rows, PAD)
    real = batch.tokens != PAD
    assert sorted(batch.tokens[real].tolist()) == tokens.tolist()
    assert int(batch.loss_mask.sum()) == sum(max(n - 1, 0) for n in lengths)
    assert torch.equal(batch.targets[batch.loss_mask], batch.tokens[batch.loss_mask] + 1)
    assert (batch.targets[~batch.loss_mask] == PAD).all()
    assert not batch.loss_mask[~real].any()
    assert (real.long().diff(dim=1) <= 0).all(), "pads stand behind the tokens"
    document = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    firsts = set(offsets[:-1][np.array(lengths) > 0].tolist())
    rows_of = {}
    for r, row in enumerate(batch.tokens.tolist()):
        for place, token in enumerate(row):
            starts_pads = token == PAD and place and row[place - 1] != PAD
            assert bool(batch.reset[r, place]) == (place == 0 or token in firsts or bool(starts_pads))
            if token != PAD:
                rows_of.setdefault(int(document[token]), set()).add(r)
    for d, rows in rows_of.items():
        assert len(rows) == -(-lengths[d] // seq_len)
    packing = plan.packing()
    assert packing.documents == len(rows_of)
    assert packing.cut_documents == sum(len(rows) > 1 for rows in rows_of.values())
    assert packing.row_tokens == batch.tokens.numel()
    assert packing.padding_tokens == int((~real).sum())


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 16), rows=st.lists(st.integers(0, 60), min_size=1, max_size=9))
def test_any_rows_in_any_order_are_those_of_the_whole_reading(lengths, seq_len, rows):
    tokens, offsets = corpus(lengths)
    plan = BestFitPlan.build(offsets, np.arange(len(lengths)), seq_len).shuffled(1, 2)
    whole = plan.rows(tokens, 0, 61, PAD)
    some = plan.take(tokens, np.array(rows), PAD)
    for name in ("tokens", "targets", "reset", "loss_mask"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[rows])


def test_epochs_keep_the_number_of_rows_and_change_rows_and_their_documents():
    rng = np.random.default_rng(0)
    tokens, offsets = corpus(rng.integers(1, 12, 300))
    plan = BestFitPlan.build(offsets, np.arange(300), 16)
    epochs = [plan.shuffled(0, e).rows(tokens, 0, plan.num_rows, PAD).tokens for e in range(2)]
    again = plan.shuffled(0, 0).rows(tokens, 0, plan.num_rows, PAD).tokens
    assert torch.equal(epochs[0], again)
    rows = [{tuple(row) for row in epoch.tolist()} for epoch in epochs]
    assert len(rows[0]) == len(rows[1]) == plan.num_rows
    assert len(rows[0] & rows[1]) < plan.num_rows / 2


@pytest.mark.parametrize("seq_len", [0, 1])
def test_a_row_below_two_tokens_is_refused(seq_len):
    with pytest.raises(ValueError, match=f"seq_len={seq_len}: a row needs at least 2 tokens"):
        BestFitPlan.build(np.array([0, 3]), np.array([0]), seq_len)


def test_corpora_of_whole_rows_alone_and_of_nothing():
    tokens, offsets = corpus([8, 4])
    plan = BestFitPlan.build(offsets, np.arange(2), 4)
    assert plan.rows(tokens, 0, 3, PAD).tokens.flatten().tolist() == list(range(12))
    assert BestFitPlan.build(np.array([0]), np.arange(0), 4).num_rows == 0
