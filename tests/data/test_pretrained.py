import json
import sys

import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from samu_lm.data import PretrainedTokenizer, tokenizer_from_state
from samu_lm.errors import ConfigError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "é and ü"] * 20


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    return backend


def byte_fallback():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdeghlmnost", "▁t", "he"]
    vocabulary = {p: i for i, p in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("dog", normalized=False)])
    return backend


@pytest.fixture
def folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": None, "pad_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_special_tokens_are_the_declared_ones(folder):
    tokenizer = PretrainedTokenizer(str(folder))
    tokenizer.check()
    end = 0
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, end, end)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (False, True)
    ids = tokenizer.encode("the cat sat on the mat, é")
    assert ids[-1] == end
    assert len(ids) > 4  # neither truncated nor padded as the file says
    assert tokenizer.decode(ids) == "the cat sat on the mat, é"
    assert tokenizer.num_bytes(ids).sum() == len("the cat sat on the mat, é".encode())


def test_file_and_folder_are_the_same(folder):
    a, b = PretrainedTokenizer(str(folder)), PretrainedTokenizer(str(folder / "tokenizer.json"))
    a.check()
    b.check()
    assert a.fingerprint() == b.fingerprint()


def test_a_special_token_spelt_in_a_text_is_text(folder):
    tokenizer = PretrainedTokenizer(str(folder))
    ids = tokenizer.encode("a<|end|>b")
    assert ids.tolist().count(0) == 1
    assert tokenizer.decode(ids) == "a<|end|>b"
    again = tokenizer_from_state(tokenizer.state_dict())
    assert again.encode("a<|end|>b").tolist() == ids.tolist()


def test_a_bos_it_lacks_is_refused_with_the_remedy(folder):
    with pytest.raises(
        ConfigError, match=r"tokenizer\.add_bos=True: .* declares no BOS; .*tokenizer\.bos_token.*false"
    ):
        PretrainedTokenizer(str(folder), add_bos=True).check()
    with pytest.raises(ConfigError, match=r"tokenizer\.bos_token=<s>: the vocabulary of .* has no such token"):
        PretrainedTokenizer(str(folder), bos_token="<s>").check()
    tokenizer = PretrainedTokenizer(str(folder), add_bos=True, bos_token="<|end|>", add_eos=False)
    assert tokenizer.encode("the")[0] == 0
    assert tokenizer.encode("the")[-1] != 0
    with pytest.raises(ValueError, match="add_bos=True: this tokenizer's vocabulary has no such token"):
        PretrainedTokenizer(str(folder)).encode("the", add_bos=True)


def test_a_byte_fallback_vocabulary_counts_bytes(tmp_path):
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(str(tmp_path), bos_token="<s>", eos_token="</s>")
    text = " the dog é </s>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids).sum() == len(text.encode())
    assert tokenizer.num_bytes([0, 1, 2, 3 + 0xC3]).tolist() == [0, 0, 0, 1]


def test_other_vocabularies_count_decoded_bytes(tmp_path):
    backend = Backend(models.WordPiece({"[UNK]": 0, "ca": 1, "##t": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(str(tmp_path))
    assert tokenizer.encode("cat").tolist() == [1, 2]
    assert tokenizer.num_bytes([1]).tolist() == [2]


def test_state_holds_the_vocabulary_itself(folder, tmp_path):
    tokenizer = PretrainedTokenizer(str(folder))
    torch.save(tokenizer.state_dict(), tmp_path / "x.pt")
    (folder / "tokenizer.json").unlink()
    again = tokenizer_from_state(torch.load(tmp_path / "x.pt", weights_only=True))
    assert again.encode("the cat").tolist() == tokenizer.encode("the cat").tolist()
    assert again.fingerprint() == tokenizer.fingerprint()
    assert (again.bos_id, again.eos_id, again.pad_id, again.vocab_size) == (None, 0, 0, tokenizer.vocab_size)


def test_a_folder_without_any_tokenizer_is_named(folder):
    (folder / "other").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.path=.*other.*transformers cannot load it"):
        PretrainedTokenizer(str(folder / "other")).check()


def test_a_name_of_the_hub_is_loaded_through_transformers(folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|end|>")
    asked = []

    def from_pretrained(name):
        asked.append(name)
        return wrapped

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    tokenizer = PretrainedTokenizer("owner/name")
    assert tokenizer.encode("the")[0] == 0
    assert asked == ["owner/name"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, r"tokenizer\.path=None: give a tokenizer\.json"),
        ("./nowhere", r"tokenizer\.path=\./nowhere: no such file or folder: /"),
        ("nowhere/tokenizer.json", r"tokenizer\.path=nowhere/tokenizer\.json: no such file"),
    ],
)
def test_missing_paths_are_named(path, message):
    with pytest.raises(ConfigError, match=message):
        PretrainedTokenizer(path).check()


def test_a_name_needs_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"tokenizer\.path=gpt2: .*needs transformers: pip install"):
        PretrainedTokenizer("gpt2").check()


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.path=.*not a tokenizer\.json"):
        PretrainedTokenizer(str(tmp_path)).check()
