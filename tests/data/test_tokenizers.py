import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.data import ByteTokenizer, tokenizer_from_state
from samu_lm.errors import ConfigError


@settings(max_examples=25, deadline=None)
@given(text=st.binary(max_size=50), bos=st.booleans(), eos=st.booleans())
def test_bytes_round_trip_exactly_whatever_they_are(text, bos, eos):
    tokenizer = ByteTokenizer(add_bos=bos, add_eos=eos)
    ids = tokenizer.encode(text)
    assert ids.tolist() == [256] * bos + list(text) + [257] * eos
    assert ids.dtype == np.int64
    assert tokenizer.decode_bytes(ids) == text
    assert tokenizer.num_bytes(ids).sum() == len(text)


def test_text_is_utf8_and_broken_bytes_decode_to_the_replacement_character():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("é\r\n")
    assert ids.tolist() == [256, 0xC3, 0xA9, 13, 10, 257]
    assert tokenizer.decode(ids) == "é\r\n"
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert tokenizer.decode(torch.tensor([256, 104, 105])) == "hi"
    assert tokenizer.decode([]) == ""


def test_the_ids_are_the_contracts():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (258, 256, 257, 257)
    assert tokenizer.add_bos
    assert tokenizer.add_eos
    assert tokenizer.dtype is np.uint16
    assert tokenizer.encode("").tolist() == [256, 257]


def test_a_call_can_say_otherwise_for_a_prompt():
    assert ByteTokenizer().encode("a", add_eos=False).tolist() == [256, 97]
    assert ByteTokenizer(False, False).encode("a", add_bos=True).tolist() == [256, 97]


def test_num_bytes_keeps_the_shape():
    ids = torch.tensor([[256, 1, 2], [255, 257, 0]])
    assert ByteTokenizer().num_bytes(ids).tolist() == [[0, 1, 1], [1, 0, 1]]


def test_state_round_trip_through_a_weights_only_checkpoint(tmp_path):
    tokenizer = ByteTokenizer(add_bos=False)
    torch.save(tokenizer.state_dict(), tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    again = tokenizer_from_state(state)
    assert again.state_dict() == tokenizer.state_dict()
    assert again.fingerprint() == tokenizer.fingerprint() != ByteTokenizer().fingerprint()
    assert again.encode("a").tolist() == [97, 257]


def test_bad_states_and_settings_are_refused():
    with pytest.raises(ConfigError, match="tokenizer=morse: the saved tokenizer is of no kind"):
        tokenizer_from_state({"kind": "morse"})
    with pytest.raises(ConfigError, match="tokenizer=bytes: the saved tokenizer is of kind 'bpe'"):
        ByteTokenizer().load_state_dict({"kind": "bpe"})
    with pytest.raises(ConfigError, match=r"tokenizer\.add_bos=maybe: give true or false"):
        ByteTokenizer(add_bos="maybe").check()
    with pytest.raises(RuntimeError, match="nothing to learn"):
        ByteTokenizer().train([b"text"])
