import multiprocessing
import pickle
import shutil

import numpy as np
import pytest

from samu_lm.data import BPETokenizer, ByteTokenizer, TextSource
from samu_lm.data import store as store_module
from samu_lm.data.split import content_hash, held_out
from samu_lm.data.store import load_store
from samu_lm.errors import ConfigError


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i + 1))
    (folder / "empty.txt").touch()
    return folder


def source(corpus):
    return TextSource(str(corpus))


def same(a, b):
    return (
        all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "offsets", "num_bytes", "hashes"))
        and a.tokens.dtype == b.tokens.dtype
        and (a.num_empty, a.num_skipped) == (b.num_empty, b.num_skipped)
    )


def entries(cache):
    return [p for p in cache.iterdir() if p.is_dir()]


def test_the_store_holds_every_document_once(corpus):
    store = load_store(source(corpus), ByteTokenizer(), 0.2)
    texts = list(source(corpus).documents())
    assert store.tokens.dtype == np.uint16
    assert len(store.offsets) == 13
    for i, text in enumerate(texts):
        assert store.tokens[store.offsets[i] : store.offsets[i + 1]].tolist() == [256, *text, 257]
        assert (store.num_bytes[i], store.hashes[i]) == (len(text), content_hash(text))
    assert store.num_empty == 1


def test_chunks_do_not_change_the_store(corpus, monkeypatch):
    whole = load_store(source(corpus), ByteTokenizer(), 0.2)
    monkeypatch.setattr("samu_lm.data.store._CHUNK_BYTES", 30)
    assert same(whole, load_store(source(corpus), ByteTokenizer(), 0.2))


def test_an_untrained_tokenizer_learns_from_the_training_documents_alone(corpus):
    tokenizer = BPETokenizer(270)
    store = load_store(source(corpus), tokenizer, 0.2)
    texts = np.array(list(source(corpus).documents()), dtype=object)
    expected = BPETokenizer(270)
    expected.train(texts[~held_out(store.hashes, 0.2)])
    assert tokenizer.state_dict() == expected.state_dict()


def test_the_cache_gives_the_same_store_mapped_and_does_not_tokenize_again(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    for make in (lambda: BPETokenizer(270), ByteTokenizer):
        plain, first, second = make(), make(), make()
        memory = load_store(source(corpus), plain, 0.2)
        assert same(memory, load_store(source(corpus), first, 0.2, str(cache)))
        with monkeypatch.context() as patch:
            patch.setattr("samu_lm.data.store._tokenize", None)
            mapped = load_store(source(corpus), second, 0.2, str(cache))
        assert same(memory, mapped)
        assert isinstance(mapped.tokens, np.memmap)
        assert second.state_dict() == first.state_dict() == plain.state_dict()
    assert len(entries(cache)) == 2


def test_the_cache_knows_contents_options_and_tokenizer(corpus, tmp_path):
    cache = tmp_path / "cache"

    def count(*args):
        load_store(*args, str(cache))
        return len(entries(cache))

    assert count(source(corpus), ByteTokenizer(), 0.2) == 1
    assert count(source(corpus), ByteTokenizer(), 0.3) == 1  # the split is no part of the tokens
    assert count(source(corpus), ByteTokenizer(add_bos=False), 0.2) == 2
    assert count(TextSource(str(corpus), separator=" "), ByteTokenizer(), 0.2) == 3
    assert count(source(corpus), BPETokenizer(270), 0.2) == 4
    assert count(source(corpus), BPETokenizer(270), 0.3) == 5  # but of what BPE learns
    (corpus / "00.txt").write_text("changed")
    assert count(source(corpus), ByteTokenizer(), 0.2) == 6


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "hashes.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_entry_is_noticed_and_made_anew(corpus, tmp_path, caplog, name, damage):
    cache = tmp_path / "cache"
    good = load_store(source(corpus), ByteTokenizer(), 0.2)
    load_store(source(corpus), ByteTokenizer(), 0.2, str(cache))
    file = entries(cache)[0] / name
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole[:-3] + b"???")
    assert same(good, load_store(source(corpus), ByteTokenizer(), 0.2, str(cache)))
    assert "is damaged" in caplog.text
    caplog.clear()
    assert same(good, load_store(source(corpus), ByteTokenizer(), 0.2, str(cache)))
    assert not caplog.text
    assert len(entries(cache)) == 1


def test_an_interrupted_job_leaves_no_entry(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def interrupted(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("samu_lm.data.store._digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_store(source(corpus), ByteTokenizer(), 0.2, str(cache))
    assert not entries(cache)


def test_a_folder_that_cannot_be_written_names_the_key(corpus, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*file/cache: cannot be written or read"):
        load_store(source(corpus), ByteTokenizer(), 0.2, str(tmp_path / "file" / "cache"))


def _job(corpus, cache, start, results, lock):
    if not lock:
        import fcntl

        fcntl.flock = lambda *_: None
    start.wait()
    try:
        store = load_store(TextSource(str(corpus)), BPETokenizer(270), 0.2, str(cache))
        results.put(int(store.tokens.astype(np.int64).sum()))
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.mark.parametrize("lock", [True, False])
def test_jobs_that_start_together_share_one_whole_entry(corpus, tmp_path, lock):
    expected = int(load_store(source(corpus), BPETokenizer(270), 0.2).tokens.astype(np.int64).sum())
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(6), context.Queue()
    jobs = [context.Process(target=_job, args=(corpus, cache, start, results, lock)) for _ in range(6)]
    for job in jobs:
        job.start()
    assert [results.get(timeout=120) for _ in jobs] == [expected] * 6
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_a_whole_entry_of_another_job_stays(corpus, tmp_path, damaged):
    """Without locks two jobs write one entry: the second keeps the first's, which that may be opening just then."""
    cache = tmp_path / "cache"
    load_store(source(corpus), ByteTokenizer(), 0.2, str(cache))
    (entry,) = entries(cache)
    if damaged:
        (entry / "tokens.bin").write_bytes(b"?")
    before = (entry / "meta.json").stat().st_ino
    store_module._write_entry(entry, source(corpus), ByteTokenizer(), 0.2)
    assert ((entry / "meta.json").stat().st_ino == before) is not damaged
    assert entries(cache) == [entry]
    assert same(
        load_store(source(corpus), ByteTokenizer(), 0.2, str(cache)), load_store(source(corpus), ByteTokenizer(), 0.2)
    )


def test_an_entry_that_is_gone_again_is_written_again(corpus, tmp_path, monkeypatch):
    write, written = store_module._write_entry, []

    def write_and_lose(entry, *rest):
        write(entry, *rest)
        written.append(entry)
        if len(written) == 1:
            shutil.rmtree(entry)

    monkeypatch.setattr(store_module, "_write_entry", write_and_lose)
    store = load_store(source(corpus), ByteTokenizer(), 0.2, str(tmp_path / "cache"))
    assert len(written) == 2
    assert same(store, load_store(source(corpus), ByteTokenizer(), 0.2))


def test_a_mapped_store_is_pickled_by_its_file(corpus, tmp_path):
    memory = load_store(source(corpus), ByteTokenizer(), 0.2)
    mapped = load_store(source(corpus), ByteTokenizer(), 0.2, str(tmp_path / "cache"))
    again = pickle.loads(pickle.dumps(mapped))
    assert isinstance(again.tokens, np.memmap)
    assert same(memory, again)
    assert same(memory, pickle.loads(pickle.dumps(memory)))
