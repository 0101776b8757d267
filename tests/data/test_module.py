import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samu_lm.data import BPETokenizer, ByteTokenizer, LMDataModule, TextSource, row_order, tokenizer_from_state
from samu_lm.errors import ConfigError


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i + 1))
    return folder


def module(corpus, tokenizer=None, seq_len=32, batch_size=4, rank=None, **options):
    data = LMDataModule(TextSource(str(corpus)), tokenizer or ByteTokenizer(), seq_len, batch_size, **options)
    if rank is not None:
        data.trainer = SimpleNamespace(global_rank=rank[0], world_size=rank[1])
    return data


def ready(*args, **options):
    data = module(*args, **options)
    data.setup("fit")
    return data


def train(data, steps, world_size=1):
    """Rows of the next ``steps`` batches, epoch after epoch, as a training loop draws them."""
    out = []
    while True:
        for batch in data.train_dataloader():
            if steps == 0:
                return torch.cat(out)
            out.append(torch.stack([batch.tokens, batch.targets, batch.reset.long(), batch.loss_mask.long()], dim=-1))
            data.advance(data.batch_size * world_size)
            steps -= 1
        if steps == 0:
            return torch.cat(out)


def documents_of(rows):
    """The texts in rows of the bytes tokenizer, BOS to EOS."""
    ids = rows[:, :, 0].flatten()
    ids = ids[rows[:, :, 3].flatten().bool() | (ids == 257)].tolist()  # targets' positions and document ends
    texts, current = [], []
    for i in ids:
        if i == 256:
            current = []
        elif i == 257 and current is not None:
            texts.append(bytes(current))
            current = None
        elif current is not None:
            current.append(i)
    return texts


def test_an_epoch_has_every_training_document_once_and_no_other(corpus):
    data = ready(corpus, val_fraction=0.3)
    texts = list(data.source.documents())
    train_texts = {texts[i] for i in data.corpus.documents["train"][0]}
    val_texts = {texts[i] for i in data.corpus.documents["val"][0]}
    assert train_texts | val_texts == set(texts)
    assert not train_texts & val_texts
    steps = len(data.train_dataloader())
    for epoch in range(2):
        served = train(data, steps)[: data.rows_per_epoch]
        in_stream_order = served[np.argsort(row_order(data.rows_per_epoch, data.seed, epoch))]
        assert sorted(documents_of(in_stream_order)) == sorted(train_texts)
    val = torch.cat([torch.stack([b.tokens] * 3 + [b.loss_mask.long()], -1) for b in data.val_dataloader()])
    assert documents_of(val) == [t for t in texts if t in val_texts]  # in the source's order


def test_sizes(corpus):
    data = ready(corpus, val_fraction=0.3)
    texts = list(data.source.documents())
    held = [texts[i] for i in data.corpus.documents["val"][0]]
    assert data.num_val_documents == len(held)
    assert data.num_val_bytes == sum(map(len, held))
    assert data.num_val_tokens == sum(len(t) + 2 for t in held)
    assert data.num_train_documents + data.num_val_documents == 20
    assert data.num_train_tokens == data.num_train_bytes + 2 * data.num_train_documents
    targets = sum(int(b.loss_mask.sum()) for b in data.val_dataloader())
    assert targets == data.size("val").targets == data.num_val_tokens - data.num_val_documents
    assert data.rows_per_epoch == math.ceil(data.num_train_tokens / 32)
    with pytest.raises(ValueError, match="split='test': choose"):
        data.size("test")


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_at_any_step_it_reads_what_the_straight_run_reads(corpus, workers):
    straight = ready(corpus)
    steps = len(straight.train_dataloader())
    total = 3 * steps
    expected = train(straight, total)
    stops = [1, 2, steps - 1, steps, steps + 1, 2 * steps, total - 1] if workers == 0 else [2, steps]
    for stop in stops:
        before = ready(corpus, num_workers=workers)
        head = train(before, stop)
        after = ready(corpus, num_workers=workers)
        after.load_state_dict(before.state_dict())
        tail = train(after, total - stop)
        assert torch.equal(torch.cat([head, tail]), expected)
        assert after.state_dict() == straight.state_dict()
    assert straight.epoch == 3


def real(rows):
    return rows[rows[:, :, 3].any(dim=1)]


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (3, 1), (7, 1), (2, 2), (3, 4)])
def test_resumed_with_another_batch_or_number_of_ranks_it_goes_on_with_the_next_row(corpus, batch_size, world_size):
    straight = ready(corpus)
    steps = len(straight.train_dataloader())
    expected = real(train(straight, 2 * steps))
    before = ready(corpus)
    head = real(train(before, 5))
    state = before.state_dict()
    assert state["rows_consumed"] == 20
    ranks = [ready(corpus, batch_size=batch_size, rank=(r, world_size)) for r in range(world_size)]
    for data in ranks:
        data.load_state_dict(state)
    tail = []
    while ranks[0].epoch < 2:
        for batches in zip(*(train_epoch(data, world_size) for data in ranks), strict=True):
            tail += batches
    assert torch.equal(torch.cat([head, real(torch.cat(tail))]), expected)
    assert {data.rows_consumed for data in ranks} == {straight.rows_consumed} == {2 * straight.rows_per_epoch}


def train_epoch(data, world_size):
    for batch in data.train_dataloader():
        yield torch.stack([batch.tokens, batch.targets, batch.reset.long(), batch.loss_mask.long()], dim=-1)
        data.advance(data.batch_size * world_size)


def test_the_pad_rows_of_an_epochs_last_batch_are_not_counted(corpus):
    data = ready(corpus, batch_size=5)
    assert data.rows_per_epoch % 5
    train(data, len(data.train_dataloader()))
    assert data.rows_consumed == data.rows_per_epoch
    data.advance(0)
    assert data.rows_consumed == data.rows_per_epoch
    with pytest.raises(ValueError, match="rows=-1: the position only moves forward"):
        data.advance(-1)


def test_two_ranks_validate_every_document_once(corpus):
    alone = torch.cat([b.tokens for b in ready(corpus, val_fraction=0.4).val_dataloader()])
    ranks = [list(ready(corpus, val_fraction=0.4, rank=(r, 2)).val_dataloader()) for r in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    together = torch.cat([b.tokens for pair in zip(*ranks) for b in pair])
    n = min(len(alone), len(together))
    assert torch.equal(alone[:n], together[:n])
    assert together[n:].eq(257).all()
    assert alone[n:].eq(257).all()


def _gloo_rank(rank, corpus, port_file, out):
    torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    data = ready(corpus, num_workers=rank)  # the number of workers is each rank's own affair
    torch.save(torch.cat(list(train_epoch(data, 2))), out / f"{rank}.pt")
    assert data.rows_consumed == data.rows_per_epoch
    torch.distributed.destroy_process_group()


def test_two_processes_share_an_epoch(corpus, tmp_path):
    torch.multiprocessing.start_processes(_gloo_rank, (corpus, tmp_path / "port", tmp_path), 2, start_method="fork")
    shares = [torch.load(tmp_path / f"{r}.pt").split(4) for r in range(2)]
    together = torch.cat([rows for pair in zip(*shares, strict=True) for rows in pair])
    alone = ready(corpus)
    assert torch.equal(real(together), real(train(alone, len(alone.train_dataloader()))))


def test_the_order_depends_on_the_seed_and_the_epoch(corpus):
    one, again, other = ready(corpus, seed=1), ready(corpus, seed=1), ready(corpus, seed=2)
    steps = len(one.train_dataloader())
    first, second = train(one, steps), train(one, steps)
    assert torch.equal(first, train(again, steps))
    assert not torch.equal(first, second)
    assert not torch.equal(first, train(other, steps))
    assert np.array_equal(one.corpus.documents["val"][0], other.corpus.documents["val"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 16}, r"data\.seq_len=16: the checkpoint stopped at row 8 of a run with seq_len 32; resume with"),
        ({"seed": 5}, "seed=5: the checkpoint stopped at row 8 of a run with seed 0"),
        ({"tokenizer": ByteTokenizer(add_eos=False)}, "tokenizer=bytes: .* of a run with other tokenizer"),
        ({"val_fraction": 0.5}, r"data\.path=.*corpus: .* of a run with other documents"),
    ],
)
def test_a_position_in_other_rows_is_refused(corpus, change, message):
    data = ready(corpus)
    train(data, 2)
    with pytest.raises(ConfigError, match=message):
        ready(corpus, **change).load_state_dict(data.state_dict())
    early = module(corpus, **change)  # loaded before setup, checked there
    early.load_state_dict(data.state_dict())
    with pytest.raises(ConfigError, match=message):
        early.setup()
    with pytest.raises(ConfigError, match=message):
        early.setup()


def test_a_changed_corpus_is_noticed_at_resume(corpus):
    state = ready(corpus).state_dict()
    (corpus / "99.txt").write_text("one more")
    with pytest.raises(ConfigError, match="other documents"):
        ready(corpus, val_fraction=0.05).load_state_dict(state)


def test_a_bare_position_is_enough_and_state_survives_a_weights_only_checkpoint(corpus, tmp_path):
    data = ready(corpus)
    data.load_state_dict({"rows_consumed": 3})
    torch.save(data.state_dict(), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == data.state_dict()
    unread = module(corpus)
    assert unread.state_dict() == {"rows_consumed": 0}
    unread.load_state_dict(data.state_dict())
    assert unread.state_dict() == data.state_dict()


def test_entropy_of_the_held_out_bytes(corpus):
    data = ready(corpus, val_fraction=0.3)
    for split in ("train", "val"):
        text = b"".join(t for i, t in enumerate(data.source.documents()) if i in data.corpus.documents[split][0])
        p = [text.count(b) / len(text) for b in set(text)]
        expected = -sum(q * math.log(q) for q in p)
        entropy = data.byte_unigram_entropy(split)
        assert entropy.nats == pytest.approx(expected, rel=1e-12)
        assert entropy.bits == pytest.approx(expected / math.log(2), rel=1e-12)
    assert data.byte_unigram_entropy() == data.byte_unigram_entropy("val")


def test_bpe_is_trained_in_setup_and_a_trained_one_is_left_alone(corpus):
    data = ready(corpus, BPETokenizer(300))
    assert data.tokenizer.is_trained
    state = data.tokenizer.state_dict()
    again = ready(corpus, tokenizer_from_state(state), val_fraction=0.5)
    assert again.tokenizer.state_dict() == state


def test_the_cache_gives_the_same_batches(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = ready(corpus, BPETokenizer(300))
    for workers in (0, 2):
        cached = module(corpus, BPETokenizer(300), cache_dir="cache", num_workers=workers)
        cached.prepare_data()
        cached.setup()
        assert isinstance(cached.store.tokens, np.memmap)
        assert torch.equal(train(cached, 12), train(ready(corpus, BPETokenizer(300)), 12))
    assert (tmp_path / "cache").is_dir()
    assert plain.state_dict()["stream"] == cached.state_dict()["stream"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seq_len": 1}, r"data\.seq_len=1: give a whole number, 2 or more"),
            ({"seq_len": 2.5}, r"data\.seq_len=2\.5: give a whole number"),
            ({"batch_size": 0}, r"data\.batch_size=0: give a whole number, 1 or more"),
            ({"batch_size": True}, r"data\.batch_size=True: give a whole number"),
            ({"num_workers": -1}, r"data\.num_workers=-1: give a whole number, 0 or more"),
            ({"seed": "x"}, "seed=x: give a whole number"),
            ({"val_fraction": 0.0}, r"data\.val_fraction=0\.0: give a number between 0 and 1"),
            ({"val_fraction": 1}, r"data\.val_fraction=1: give a number between"),
            ({"val_fraction": math.nan}, r"data\.val_fraction=nan: give a number between"),
            ({"tokenizer": BPETokenizer(3)}, r"tokenizer\.vocab_size=3"),
        ],
    )
    def test_settings_are_checked_before_data_is_read(self, corpus, monkeypatch, options, message):
        monkeypatch.setattr(TextSource, "_read", None)
        with pytest.raises(ConfigError, match=message):
            module(corpus, **options).check()
        with pytest.raises(ConfigError, match=message):
            module(corpus, **options).setup()

    def test_a_missing_path(self, tmp_path):
        with pytest.raises(ConfigError, match=r"data\.path=.*nowhere: no such file or folder"):
            module(tmp_path / "nowhere").check()

    def test_a_corpus_without_a_document(self, tmp_path):
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbf")
        (tmp_path / "b").write_bytes(b"\xff\xfe")
        data = LMDataModule(TextSource(str(tmp_path), on_error="skip"), ByteTokenizer(), 8, 1)
        data.check()
        with pytest.raises(
            ConfigError, match=r"the corpus is empty: .*\(1 empty and 1 faulty documents were left out\)"
        ):
            data.setup()

    def test_a_single_document_cannot_be_split(self, tmp_path):
        (tmp_path / "a").write_text("only one")
        with pytest.raises(ConfigError, match=r"data=\(1 documents\): needs two different documents"):
            module(tmp_path).setup()

    def test_documents_of_one_token_give_nothing_to_predict(self, tmp_path):
        for name in "abcd":
            (tmp_path / name).write_text(name)
        with pytest.raises(ConfigError, match=r"data\.path=.*: no training document has 2 tokens"):
            module(tmp_path, ByteTokenizer(False, False)).setup()

    def test_use_before_setup(self, corpus):
        for use in (lambda d: d.train_dataloader(), lambda d: d.val_dataloader(), lambda d: d.num_val_tokens):
            with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
                use(module(corpus))
