import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.data.split import content_hash, held_out
from samu_lm.errors import ConfigError


def hashes(texts):
    return np.array([content_hash(t) for t in texts], dtype=np.uint64)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.binary(max_size=3), min_size=2, max_size=40).filter(lambda t: len(set(t)) > 1),
    fraction=st.floats(1e-9, 1 - 1e-9),
)
def test_both_sides_have_documents_and_no_text_is_on_both(texts, fraction):
    mask = held_out(hashes(texts), fraction)
    held = {t for t, m in zip(texts, mask) if m}
    kept = {t for t, m in zip(texts, mask) if not m}
    assert held
    assert kept
    assert not held & kept


def test_the_fraction_is_met_and_the_order_does_not_matter():
    texts = [str(i).encode() for i in range(5000)]
    mask = held_out(hashes(texts), 0.1)
    assert 400 < mask.sum() < 600  # 500 expected, standard deviation 21
    again = held_out(hashes(texts[::-1]), 0.1)
    assert np.array_equal(mask, again[::-1])


def test_a_document_keeps_its_side_while_the_corpus_grows():
    texts = [str(i).encode() for i in range(2000)]
    small, large = held_out(hashes(texts[:500]), 0.1), held_out(hashes(texts), 0.1)
    assert np.array_equal(small, large[:500])


def test_a_larger_fraction_holds_out_the_same_documents_and_more():
    texts = [str(i).encode() for i in range(500)]
    small, large = held_out(hashes(texts), 0.05), held_out(hashes(texts), 0.2)
    assert not (small & ~large).any()


@pytest.mark.parametrize("texts", [[b"one"], [b"same", b"same"]])
def test_a_split_without_two_different_documents_is_refused(texts):
    with pytest.raises(ConfigError, match=r"data=\(.* documents\): needs two different documents.*data\.separator"):
        held_out(hashes(texts), 0.5)
