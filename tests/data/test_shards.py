import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest

from samu_lm.data import BPETokenizer, ByteTokenizer, JsonlSource, LMDataModule, ShardSource, shard_tokenizer
from samu_lm.data import shards as shards_module
from samu_lm.errors import ConfigError
from tests.data.preparing import jsonl, prepare, texts


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    prepare(JsonlSource(str(jsonl(folder / "a.jsonl", texts(60)))), folder / "out")
    return folder / "out"


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "out")
    return tmp_path / "out"


def module(folder, tokenizer=None, **options):
    return LMDataModule(ShardSource(str(folder)), tokenizer or ByteTokenizer(), 32, 2, val_fraction=0.2, **options)


def flip(file, place=5):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens-00001.bin", "offsets.npy", "num_bytes.npy", "hashes.npy"])
def test_a_changed_file_is_refused_by_name(folder, name):
    flip(folder / name, -3)
    with pytest.raises(ConfigError, match=f"data.path={re.escape(str(folder / name))}: was changed .*; restore it, or"):
        module(folder).setup()


@pytest.mark.parametrize("name", ["tokens-00001.bin", "offsets.npy"])
def test_a_file_cut_short_or_gone_is_refused_by_name_before_data_is_read(folder, name):
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 2)
    with pytest.raises(ConfigError, match=f"{name}: has {size - 2} bytes and was written with {size}; restore it"):
        module(folder).check()
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read \(No such file or directory\); restore it"):
        module(folder).check()


def test_a_change_after_a_verification_is_noticed_and_what_is_verified_is_not_hashed_again(folder, monkeypatch):
    module(folder).setup()
    hashed = []
    monkeypatch.setattr(
        shards_module, "file_hash", lambda path, real=shards_module.file_hash: hashed.append(path.name) or real(path)
    )
    module(folder).setup()
    assert hashed == []
    flip(folder / "tokens-00000.bin")
    with pytest.raises(ConfigError, match=r"tokens-00000\.bin: was changed since it was written"):
        module(folder).setup()
    assert hashed == ["tokens-00000.bin"]
    flip(folder / "tokens-00000.bin")
    module(folder).setup()


def test_a_folder_that_cannot_be_written_is_verified_each_time(folder, monkeypatch):
    (folder / "verified.json").unlink()

    def refuse(*arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    for _ in range(2):
        module(folder).setup()
    flip(folder / "tokens-00002.bin")
    with pytest.raises(ConfigError, match=r"tokens-00002\.bin: was changed"):
        module(folder).setup()


def test_a_changed_manifest_is_refused(folder):
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "documents": 7}))
    with pytest.raises(ConfigError, match=r"data\.path=.*manifest\.json was changed since it was written; restore it"):
        module(folder).check()
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read"):
        module(folder).check()
    file.write_text(shards_module.manifest_text({k: v for k, v in content.items() if k != "hash"} | {"format": 99}))
    with pytest.raises(ConfigError, match=r"manifest\.json has format 99, this version reads 1"):
        module(folder).check()


def test_a_half_written_folder_is_refused_by_the_files_name(folder):
    (folder / "manifest.json").rename(folder / "job.json")
    (folder / "tokens-00003.bin").rename(folder / "tokens-00003.bin.partial")
    message = (
        r"tokens-00003\.bin\.partial is half-written: samu-lm prepare has not finished; run the same command again"
    )
    with pytest.raises(ConfigError, match=message):
        module(folder).check()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, r"data\.path=None: give a folder that samu-lm prepare wrote"),
        ("nowhere", r"data\.path=nowhere: no such folder: .*; write it with samu-lm prepare \.\.\. out=nowhere"),
        (".", r"holds no manifest\.json; write it with samu-lm prepare"),
    ],
)
def test_a_folder_that_holds_no_shards(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        module(path).check() if path else LMDataModule(ShardSource(None), ByteTokenizer(), 8, 1).check()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_shard_that_breaks_while_it_is_read_ends_the_run_by_its_name(folder, workers, damage):
    """Unreadable in the middle of training: an error in one line, no hang, no document left out in silence."""
    data = module(folder, num_workers=workers)
    data.setup()
    batches = iter(data.train_dataloader())
    next(batches)
    for file in folder.glob("tokens-*.bin"):
        if damage == "cut":
            os.truncate(file, 10)
        else:
            file.unlink()
    with pytest.raises(ConfigError, match=r"^data\.path=.*tokens-0000\d\.bin: (has 10 bytes now|cannot be read any)"):
        list(batches)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (BPETokenizer(300), r"tokenizer=bpe: the tokens in .*out are of tokenizer=bytes; leave tokenizer= out"),
        (ByteTokenizer(add_eos=False), r"tokenizer=bytes, add_eos=False: .*are of tokenizer=bytes, add_eos=True"),
    ],
)
def test_a_contradicting_tokenizer_is_refused_naming_both(folder, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        module(folder, tokenizer).check()


def test_a_learnt_tokenizer_is_the_shards_own(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(60))
    prepare(JsonlSource(str(path)), tmp_path / "out", BPETokenizer(300))
    own = shard_tokenizer(str(tmp_path / "out"))
    assert own.is_trained
    data = module(tmp_path / "out", BPETokenizer(300))  # the same settings, untrained
    data.setup()
    assert data.tokenizer.fingerprint() == own.fingerprint()
    with pytest.raises(ConfigError, match=r"tokenizer=bpe, vocab_size=299: .* tokenizer=bpe, vocab_size=300"):
        module(tmp_path / "out", BPETokenizer(299)).check()
    trained = BPETokenizer(300)
    trained.train([b"other text, other pairs"])
    with pytest.raises(ConfigError, match=r"tokenizer=bpe: .* of tokenizer=bpe with another vocabulary"):
        module(tmp_path / "out", trained).check()


def test_the_split_is_by_text_wherever_the_documents_lie(folder, tmp_path):
    """Equal texts on one side, the same side in every folder of shards."""
    lines = [t for t in texts(60) if t]
    again = jsonl(tmp_path / "b.jsonl", [*lines[::-1], *lines[:20]])
    prepare(JsonlSource(str(again)), tmp_path / "other", shard_tokens=3000)
    sides = []
    for place in (folder, tmp_path / "other"):
        data = module(place)
        data.setup()
        sides.append({split: sorted(set(data._texts(split))) for split in ("train", "val")})
    assert sides[0] == sides[1]
    assert sides[0]["val"] and not set(sides[0]["val"]) & set(sides[0]["train"])


def test_only_the_tokens_that_are_read_are_mapped_and_they_are_pickled_by_their_files(folder):
    store = ShardSource(str(folder)).tokenized()
    assert isinstance(store.offsets, np.memmap)
    blob = pickle.dumps(store.tokens)
    assert len(blob) < 2000
    starts, lengths = np.array(store.offsets[:3]), np.diff(store.offsets[:4])
    for one, other in zip(store.tokens.pieces(starts, lengths), pickle.loads(blob).pieces(starts, lengths)):
        assert np.array_equal(one, other)
    assert len(store.tokens) == store.offsets[-1]
