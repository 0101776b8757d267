import gc
import json
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from samu_lm.data import BPETokenizer, ByteTokenizer, JsonlSource, LMDataModule, ShardSource, TextSource, tokenizing
from samu_lm.data.store import load_store
from samu_lm.errors import ConfigError, SamuLMError
from tests.data.preparing import contents, jsonl, prepare, sources, texts

KINDS = ["jsonl", "text", "parquet", "hub", "stdlib"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare") / "corpora"
    sources(folder)
    return folder


class Stop(Exception):
    pass


def stop_after(chunks):
    """A report that ends the preparation as a kill would, after so many chunks."""
    left = [chunks]

    def report(progress):
        progress.reported = 0.0  # each chunk is reported
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return report


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_what_the_source_holds(corpora, tmp_path, kind):
    """Documents without text are dropped and counted, faulty ones too where that is asked."""
    source = sources(corpora)[kind]
    manifest = prepare(source, tmp_path / "out")
    expected = load_store(sources(corpora)[kind], ByteTokenizer(), 0.2)
    shards = ShardSource(str(tmp_path / "out"))
    found = shards.tokenized()
    starts = np.array(found.offsets[:-1])
    pieces = found.tokens.pieces(starts, np.diff(found.offsets))
    assert np.array_equal(np.concatenate(pieces), expected.tokens)
    for name in ("offsets", "num_bytes", "hashes"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    counts = {"jsonl": (1, 1), "text": (1, 0), "parquet": (1, 1), "hub": (1, 0)}
    assert (found.num_empty, found.num_skipped) == (expected.num_empty, expected.num_skipped)
    if kind in counts:
        assert (found.num_empty, found.num_skipped) == (counts[kind][0], counts[kind][1])
    assert len(manifest["shards"]) > 2
    assert manifest["documents"] == len(expected.num_bytes)
    assert manifest["tokens"] == len(expected.tokens) == sum(s["tokens"] for s in manifest["shards"])
    assert manifest["bytes"] == int(expected.num_bytes.sum())
    assert list(shards.documents()) == list(source.documents())


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(corpora, tmp_path, kind):
    prepare(sources(corpora)[kind], tmp_path / "straight")
    expected = contents(tmp_path / "straight")
    stops = 0
    for chunks in (0, 1, 3, 7, 12):
        out = tmp_path / f"stopped-{chunks}"
        try:
            prepare(sources(corpora)[kind], out, report=stop_after(chunks))
        except Stop:
            stops += len(list(out.glob("parts/*.json")))
        else:  # a corpus of fewer chunks
            assert contents(out) == expected
            continue
        with pytest.raises(ConfigError, match=r"half-written: samu-lm prepare has not finished; run the same command"):
            ShardSource(str(out)).check()
        if chunks == 7:  # a second stop, before the first new shard is finished
            with pytest.raises(Stop):
                prepare(sources(corpora)[kind], out, report=stop_after(0))
        prepare(sources(corpora)[kind], out)
        assert contents(out) == expected
    assert stops > 2, "some of the stops came after a finished shard"


def test_workers_change_nothing_and_a_finished_folder_is_left_as_it_is(corpora, tmp_path):
    prepare(sources(corpora)["jsonl"], tmp_path / "alone")
    prepare(sources(corpora)["jsonl"], tmp_path / "two", workers=2)
    assert contents(tmp_path / "alone") != {}
    assert contents(tmp_path / "two") == contents(tmp_path / "alone")
    times = {f: f.stat().st_mtime_ns for f in (tmp_path / "two").iterdir()}
    prepare(sources(corpora)["jsonl"], tmp_path / "two")
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "two").iterdir()} == times


def test_a_bpe_vocabulary_is_that_of_training_without_shards(corpora, tmp_path):
    plain, stopped = BPETokenizer(300), BPETokenizer(300)
    load_store(sources(corpora)["text"], plain, 0.2)
    with pytest.raises(Stop):
        prepare(sources(corpora)["text"], tmp_path / "out", stopped, report=stop_after(1))
    manifest = prepare(sources(corpora)["text"], tmp_path / "out", BPETokenizer(300))
    assert manifest["tokenizer"] == plain.state_dict()
    assert ShardSource(str(tmp_path / "out")).tokenizer().fingerprint() == plain.fingerprint()


def test_damaged_notes_are_refused_by_name(corpora, tmp_path):
    with pytest.raises(Stop):
        prepare(sources(corpora)["jsonl"], tmp_path / "out", report=stop_after(5))
    for name in ("job.json", "parts/00000.json"):
        file = tmp_path / "out" / name
        whole = file.read_text()
        for damage in ("[]", whole[:-5]):
            file.write_text(damage)
            with pytest.raises(ConfigError, match=rf"out=.*{name}: is damaged"):
                prepare(sources(corpora)["jsonl"], tmp_path / "out")
        file.write_text(whole)
    manifest = prepare(sources(corpora)["jsonl"], tmp_path / "out")
    assert manifest["documents"]
    (tmp_path / "out" / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read"):
        ShardSource(str(tmp_path / "out")).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": ByteTokenizer(add_eos=False)},
            "holds a preparation with other tokenizer; choose another folder",
        ),
        ({"shard_tokens": 401}, "with other shard_tokens"),
        ({"source": "text"}, r"with other data \(source, options or files\)"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_preparation_is_not_mixed_in(corpora, tmp_path, change, message, finished):
    options = {} if finished else {"report": stop_after(5)}
    try:
        prepare(sources(corpora)["jsonl"], tmp_path / "out", **options)
    except Stop:
        assert not finished
    change = dict(change)
    with pytest.raises(ConfigError, match=message):
        prepare(sources(corpora)[change.pop("source", "jsonl")], tmp_path / "out", **change)


def test_a_corpus_that_changed_meanwhile_is_noticed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(60))
    with pytest.raises(Stop):
        prepare(JsonlSource(str(path)), tmp_path / "out", report=stop_after(5))
    jsonl(path, texts(60, seed=1))
    with pytest.raises(ConfigError, match=r"out=.*: holds a preparation with other data"):
        prepare(JsonlSource(str(path)), tmp_path / "out")


@pytest.mark.parametrize("damage", ["flip", "cut", "documents"])
def test_a_finished_shard_that_changed_is_refused_by_name_and_can_be_made_again(corpora, tmp_path, damage):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(sources(corpora)["jsonl"], out, report=stop_after(7))
    shard = out / "tokens-00000.bin"
    file = out / "parts" / "00000.documents" if damage == "documents" else shard
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data[:-2] if damage == "cut" else data)
    with pytest.raises(
        ConfigError, match=f"out={re.escape(str(file))}: was changed .*; delete {re.escape(str(shard))}"
    ):
        prepare(sources(corpora)["jsonl"], out)
    shard.unlink()
    prepare(sources(corpora)["jsonl"], out)
    prepare(sources(corpora)["jsonl"], tmp_path / "straight")
    assert contents(out) == contents(tmp_path / "straight")


def test_an_empty_corpus_a_faulty_one_and_a_foreign_folder(tmp_path):
    (tmp_path / "blank").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ConfigError, match=r"data\.path=.*: the corpus is empty: .*\(1 empty and 0 faulty documents"):
        prepare(TextSource(str(tmp_path / "blank")), tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(ConfigError, match=r'bad\.jsonl:2: "text" is null, not a string'):
        prepare(JsonlSource(str(tmp_path / "bad.jsonl")), tmp_path / "bad")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"out=.*: holds other files \(thesis.tex\); choose a new or an empty folder"):
        prepare(JsonlSource(str(jsonl(tmp_path / "a.jsonl", texts(9)))), tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"out=.*file.*: cannot be written"):
        prepare(JsonlSource(str(tmp_path / "a.jsonl")), tmp_path / "file" / "out")


def _big_corpus(path, megabytes):
    with open(path, "w") as file:
        for i in range(megabytes * 500):
            file.write(json.dumps({"text": f"{i} " + "some words of a document " * 80}) + "\n")
    return path


def _command(corpus, out, *more):
    arguments = ["data=jsonl", f"data.path={corpus}", f"out={out}", "shard_tokens=3000000", *more]
    return [sys.executable, "-m", "samu_lm", "prepare", *arguments]


def _children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds processes through /proc")
def test_killed_in_the_middle_it_continues_to_the_same_bytes_and_leaves_no_process(tmp_path):
    corpus = _big_corpus(tmp_path / "big.jsonl", 30)
    out = tmp_path / "out"
    process = subprocess.Popen(_command(corpus, out, "workers=1"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "tokens-00001.bin").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert workers
    assert not (out / "manifest.json").exists()
    finished = {f.name: f.stat().st_mtime_ns for f in out.glob("tokens-*.bin")}
    run = subprocess.run(_command(corpus, out, "workers=1"), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "15,000 documents" in run.stdout
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished, "these were not made again"
    subprocess.run(_command(corpus, tmp_path / "straight", "workers=0"), check=True, capture_output=True)
    assert contents(out) == contents(tmp_path / "straight")
    while any(map(_alive, workers)):
        assert time.monotonic() < deadline + 30, "the tokenizing processes outlive the one that was killed"
        time.sleep(0.05)


def test_a_tokenizing_process_that_is_killed_ends_the_run_with_the_reason(tmp_path):
    corpus = _big_corpus(tmp_path / "big.jsonl", 10)

    def kill_one(progress):
        progress.reported = 0.0
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(SamuLMError, match=r"workers=1: a tokenizing process died, .*run the same command to go on"):
        prepare(JsonlSource(str(corpus)), tmp_path / "out", workers=1, chunk_bytes=1 << 20, report=kill_one)
    prepare(JsonlSource(str(corpus)), tmp_path / "out", chunk_bytes=1 << 20)


def _die_in_the_middle(_):
    """Writes the head of a result that never comes, as a process does that is killed while it hands one over."""
    for queue in (o for o in gc.get_objects() if isinstance(o, multiprocessing.queues.SimpleQueue)):
        os.write(queue._writer.fileno(), struct.pack("!i", 1000) + b"abc")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_in_the_middle_of_a_result_is_no_hang(monkeypatch):
    monkeypatch.setattr(tokenizing, "_PATIENCE", 0.3)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    future = pool.submit(_die_in_the_middle, None)
    with pytest.raises(BrokenProcessPool):
        tokenizing._result(pool, future)
    pool.shutdown(wait=True)


def test_two_preparations_of_one_folder(corpora, tmp_path):
    def second(progress):
        with pytest.raises(ConfigError, match=r"out=.*: another samu-lm prepare is writing there; wait for it"):
            prepare(sources(corpora)["jsonl"], tmp_path / "out")
        raise Stop

    with pytest.raises(Stop):
        prepare(sources(corpora)["jsonl"], tmp_path / "out", report=second)


def test_the_module_reads_shards_as_it_reads_the_source(corpora, tmp_path):
    """The same split, the same rows: shards only say where the tokens lie."""
    prepare(sources(corpora)["jsonl"], tmp_path / "out")
    plain = LMDataModule(sources(corpora)["jsonl"], ByteTokenizer(), 32, 4, val_fraction=0.2)
    shards = LMDataModule(ShardSource(str(tmp_path / "out")), ByteTokenizer(), 32, 4, val_fraction=0.2)
    for data in (plain, shards):
        data.setup()
    assert plain.state_dict() == shards.state_dict()
    for one, other in zip(
        [*plain.train_dataloader(), *plain.val_dataloader()],
        [*shards.train_dataloader(), *shards.val_dataloader()],
        strict=True,
    ):
        for name in ("tokens", "targets", "reset", "loss_mask"):
            assert (getattr(one, name) == getattr(other, name)).all()
    for split in ("train", "val"):
        assert plain.byte_unigram_entropy(split) == shards.byte_unigram_entropy(split)
