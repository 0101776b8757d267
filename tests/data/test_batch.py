import dataclasses

import torch

from samu_lm.data import Batch, document_positions, pack_documents


def test_positions_count_from_each_first_token():
    reset = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    assert document_positions(reset).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]


def test_positions_without_a_first_token_count_from_the_row_start():
    assert document_positions(torch.zeros(1, 4, dtype=torch.bool)).tolist() == [[0, 1, 2, 3]]


def test_positions_of_packed_documents_restart_in_a_continued_row():
    batch = pack_documents([[1] * 5, [2] * 2], seq_len=4)
    assert document_positions(batch.reset).tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]  # the last is the pad


def test_to_moves_every_tensor_and_keeps_types():
    batch = pack_documents([[1, 2, 3]], seq_len=4)
    moved = batch.to("meta")
    for field in dataclasses.fields(Batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        assert after.device.type == "meta"
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert batch.tokens.device.type == "cpu"


def test_a_batch_passes_lightnings_precision_plugin():
    from lightning.pytorch.plugins import MixedPrecision

    batch = pack_documents([[1, 2, 3]], seq_len=4)
    converted = MixedPrecision("bf16-mixed", "cpu").convert_input(batch)
    assert isinstance(converted, Batch)
    assert converted.tokens.dtype == torch.int64
    assert torch.equal(converted.tokens, batch.tokens)
