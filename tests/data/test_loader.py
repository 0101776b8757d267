import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.benchmarks.loader import measure
from samu_lm.data import BPETokenizer, JsonlSource, PackedLoader, RowPlan, document_order
from samu_lm.errors import ConfigError
from tests.data.preparing import jsonl, prepare

PAD = 777
LENGTHS = [5, 1, 9, 3, 12, 2, 7, 30, 4, 4, 6, 11]  # 94 tokens: 24 rows of 4
TOKENS = np.arange(sum(LENGTHS), dtype=np.uint16)
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])


def plan(epoch, first_row=0):
    return RowPlan.build(OFFSETS, document_order(len(LENGTHS), 3, epoch), 4)


def loader(position=0, rank=0, world_size=1, batch_size=2, num_workers=0):
    options = {"rank": rank, "world_size": world_size, "batch_size": batch_size, "num_workers": num_workers}
    return PackedLoader(plan, 24, TOKENS, lambda: position, pad_id=PAD, **options)


def fields(batch):
    return torch.stack([batch.tokens, batch.targets, batch.reset.long(), batch.loss_mask.long()], dim=-1)


def rows(batches):
    return torch.cat([fields(b) for b in batches])


def stream(epochs):
    return torch.cat([fields(plan(e).rows(TOKENS, 0, plan(e).num_rows, PAD)) for e in range(epochs)])


@settings(max_examples=25, deadline=None)
@given(position=st.integers(0, 71), world_size=st.integers(1, 4), batch_size=st.integers(1, 7))
def test_ranks_together_read_the_rest_of_the_epoch_in_order(position, world_size, batch_size):
    ranks = [list(loader(position, r, world_size, batch_size)) for r in range(world_size)]
    steps = len(ranks[0])
    assert all(len(batches) == steps for batches in ranks)
    assert all(b.tokens.shape == (batch_size, 4) for batches in ranks for b in batches)
    in_order = rows([ranks[r][k] for k in range(steps) for r in range(world_size)])
    end = (position // 24 + 1) * 24
    assert torch.equal(in_order[: end - position], stream(3)[position:end])
    filling = in_order[end - position :]
    assert len(filling) < world_size * batch_size
    assert (filling[:, :, 0] == PAD).all()
    assert not filling[:, :, 3].any()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_len_is_the_whole_epochs_batches_wherever_it_starts(world_size):
    for position in (0, 1, 23, 24, 30):
        assert len(loader(position, world_size=world_size)) == -(-24 // (2 * world_size))


@pytest.mark.parametrize("position", [0, 7, 24])
def test_workers_change_nothing(position):
    assert torch.equal(rows(loader(position)), rows(loader(position, num_workers=2)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_more_workers_than_batches_end_cleanly():
    batches = list(loader(22, num_workers=3))
    assert torch.equal(rows(batches), stream(1)[22:])


def test_the_position_is_read_when_an_iteration_begins_and_prefetching_does_not_move_it():
    now = [4]
    options = {"rank": 0, "world_size": 1, "batch_size": 2, "pad_id": PAD, "num_workers": 2}
    one = PackedLoader(plan, 24, TOKENS, lambda: now[0], **options)
    iterator = iter(one)
    first = next(iterator)
    assert now == [4]
    assert torch.equal(fields(first), stream(1)[4:6])
    now[0] = 26
    assert torch.equal(fields(next(iterator)), stream(1)[6:8])
    assert torch.equal(fields(next(iter(one))), stream(2)[26:28])


def test_iterating_does_not_touch_the_global_random_state():
    before = torch.get_rng_state()
    list(loader())
    list(loader(num_workers=1))
    assert torch.equal(before, torch.get_rng_state())


def test_workers_start_quietly_after_a_tokenizer_used_threads(capfd, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenizer = BPETokenizer(270)
    tokenizer.train([b"some text"])
    tokenizer.encode_many([b"some text"] * 100)
    list(loader(num_workers=2))
    assert "forked" not in capfd.readouterr().err
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_rows_can_be_prepared_in_a_process_that_was_not_forked():
    from samu_lm.data.loader import RowDataset

    dataset = pickle.loads(pickle.dumps(RowDataset(plan(0), TOKENS, 2, PAD)))
    assert torch.equal(fields(dataset[3]), stream(1)[3:5])


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_ends_the_iteration_with_the_reason():
    """The run ends: it neither waits for the worker nor leaves its batches out."""
    batches = iter(loader(num_workers=2))
    next(batches)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(ConfigError, match=r"data\.num_workers=2: a process that prepares batches died.*resume=last"):
        list(batches)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_shards_are_served_fast_enough(tmp_path, packing):
    """Two million tokens a second and worker; measured at more than ten times that on one processor."""
    words = np.random.default_rng(0).integers(20, 400, 2000)
    path = jsonl(tmp_path / "a.jsonl", [f"{i} " + "word " * n for i, n in enumerate(words.tolist())])
    prepare(JsonlSource(str(path)), tmp_path / "out", shard_tokens=500_000, chunk_bytes=100_000)
    options = {"seq_len": 512, "batch_size": 8, "packing": packing, "workers": 0, "seconds": 5.0}
    result = measure(str(tmp_path / "out"), **options)
    assert result["row_tokens"] > 1_500_000
    assert result["tokens_per_processor_second_of_this_process"] > 2_000_000
