import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.data import BPETokenizer, StdlibSource, tokenizer_from_state
from samu_lm.errors import ConfigError


@pytest.fixture(scope="module")
def corpus():
    return list(StdlibSource(max_bytes=200_000).documents())


@pytest.fixture(scope="module")
def trained(corpus):
    tokenizer = BPETokenizer(vocab_size=400)
    tokenizer.train(corpus)
    return tokenizer


def test_the_vocabulary_has_the_size_asked_for(trained):
    assert trained.vocab_size == 400
    assert (trained.bos_id, trained.eos_id, trained.pad_id) == (398, 399, 399)


def test_training_is_deterministic(corpus, trained):
    again = BPETokenizer(vocab_size=400)
    again.train(corpus)
    assert again.state_dict() == trained.state_dict()


@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_round_trips(trained, text):
    ids = trained.encode(text)
    assert ids[0] == 398
    assert ids[-1] == 399
    assert trained.decode(ids) == text
    assert trained.num_bytes(ids).sum() == len(text.encode())
    assert ids[1:-1].max(initial=0) < 398


def test_it_compresses_its_corpus(corpus, trained):
    ids = trained.encode(corpus[0])
    assert len(ids) < 0.75 * len(corpus[0])
    assert trained.num_bytes(ids).sum() == len(corpus[0])


def test_many_texts_encode_as_each_alone(corpus, trained):
    for ids, text in zip(trained.encode_many(corpus[:5]), corpus):
        assert ids.tolist() == trained.encode(text).tolist()
        assert ids.dtype == trained.dtype


def test_state_round_trip_through_a_weights_only_checkpoint(trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "x.pt")
    again = tokenizer_from_state(torch.load(tmp_path / "x.pt", weights_only=True))
    assert again.encode("def f(self):").tolist() == trained.encode("def f(self):").tolist()
    assert again.fingerprint() == trained.fingerprint()
    untrained = BPETokenizer(400)
    assert not tokenizer_from_state(untrained.state_dict()).is_trained


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(caplog):
    tokenizer = BPETokenizer(vocab_size=1000)
    tokenizer.train([b"aa aa aa"])
    assert tokenizer.vocab_size < 300
    assert "tokenizer.vocab_size=1000: the training text has pairs for" in caplog.text
    assert tokenizer.decode(tokenizer.encode("aa b")) == "aa b"


def test_the_limit_on_training_text_holds():
    tokenizer = BPETokenizer(vocab_size=270, max_train_bytes=10)
    tokenizer.train([b"xyxyxyxyxy", b"qzqzqzqzqz"])
    assert len(tokenizer.encode("xyxy", add_bos=False, add_eos=False)) < 4
    assert len(tokenizer.encode("qzqz", add_bos=False, add_eos=False)) == 4
    one = BPETokenizer(vocab_size=270, max_train_bytes=4)
    one.train(["xyé".encode() * 100])  # one document over the limit, cut inside a character
    assert one.is_trained


def test_bad_settings_and_use_before_training_are_refused():
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size=257: give at least 258"):
        BPETokenizer(257).check()
    with pytest.raises(ConfigError, match=r"tokenizer\.max_train_bytes=0"):
        BPETokenizer(300, max_train_bytes=0).check()
    with pytest.raises(RuntimeError, match=r"not trained yet; call the data module's setup\(\) first"):
        BPETokenizer(300).encode("a")
