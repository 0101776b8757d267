import pytest

from samu_lm.data import BPETokenizer, ByteTokenizer, JsonlSource, LMDataModule, ShardSource, TextSource
from samu_lm.data.mixture import MAX_ROUND, MixtureSource, whole_weights
from samu_lm.errors import ConfigError
from tests.data.numbered import NumberedSource, module
from tests.data.preparing import jsonl, prepare, texts


@pytest.mark.parametrize(
    ("weights", "whole"),
    [((3, 1), [3, 1]), ((0.7, 0.3), [7, 3]), ((30, 20), [3, 2]), ((1,), [1]), ((0.1, 0.25, 2), [2, 5, 40])],
)
def test_weights_are_exact_whole_numbers(weights, whole):
    assert whole_weights({str(i): w for i, w in enumerate(weights)}) == whole


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        (None, None, r"data\.sources=None: name at least one"),
        (("a",), {"a": 0}, r"data\.weights\.a=0: give a positive number"),
        (("a",), {"a": True}, r"data\.weights\.a=True: give a positive number"),
        (("a",), {"a": float("nan")}, r"data\.weights\.a=nan: give a positive"),
        (("a", "b"), {"a": 1}, r"data\.weights\.b=None: has no value"),
        (("a",), {"a": 1, "c": 2}, r"data\.weights\.c=2: there is no such source; data\.sources has a"),
        (("a", "b"), {"a": 1, "b": MAX_ROUND}, rf"data\.weights=.*: are 1:{MAX_ROUND} in whole numbers"),
        (("nowhere",), {"nowhere": 1}, r"data\.sources\.nowhere\.path=/nowhere: no such file"),
        (("text",), {"text": 1}, r"data\.sources\.text=path: give a source such as"),
    ],
)
def test_refused_before_data_is_read(tmp_path, sources, weights, message):
    (tmp_path / "a.txt").write_text("a")
    made = {"nowhere": TextSource("/nowhere"), "text": "path"}
    sources = {name: made.get(name, TextSource(str(tmp_path))) for name in sources or ()}
    with pytest.raises(ConfigError, match=message):
        LMDataModule(MixtureSource(sources, weights), ByteTokenizer(), 8, 1).check()


def test_equal_texts_are_on_one_side_in_all_sources(tmp_path):
    shared = texts(80)
    a, b = jsonl(tmp_path / "a.jsonl", shared[:60]), jsonl(tmp_path / "b.jsonl", shared[20:])
    mixture = MixtureSource({"a": JsonlSource(str(a)), "b": JsonlSource(str(b))}, {"a": 1, "b": 1})
    data = LMDataModule(mixture, ByteTokenizer(), 32, 2, val_fraction=0.3)
    data.setup()
    sides = {split: set(data._texts(split)) for split in ("train", "val")}
    assert sides["val"]
    assert not sides["train"] & sides["val"]
    assert sides["train"] | sides["val"] == {text.encode() for text in shared if text}


def test_shards_and_texts_mix_with_the_shards_vocabulary(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", texts(60))
    prepare(JsonlSource(str(path)), tmp_path / "out", BPETokenizer(300))
    other = jsonl(tmp_path / "b.jsonl", texts(40, seed=5))
    sources = {"shards": ShardSource(str(tmp_path / "out")), "texts": JsonlSource(str(other))}
    data = LMDataModule(MixtureSource(sources, {"shards": 2, "texts": 1}), BPETokenizer(300), 32, 2, val_fraction=0.2)
    data.setup()
    assert data.tokenizer.fingerprint() == sources["shards"].tokenizer().fingerprint()
    wrong = LMDataModule(MixtureSource(sources, {"shards": 2, "texts": 1}), ByteTokenizer(), 32, 2)
    with pytest.raises(ConfigError, match=r"tokenizer=bytes: the tokens in .*out are of tokenizer=bpe; leave"):
        wrong.check()


def test_a_vocabulary_is_learnt_from_all_sources(tmp_path):
    made = [jsonl(tmp_path / f"{w}.jsonl", [f"{w * 3} {i}" for i in range(30)]) for w in ("abcabd", "xyzxyw")]
    mixture = MixtureSource({p.stem: JsonlSource(str(p)) for p in made}, {"abcabd": 1, "xyzxyw": 1})
    data = LMDataModule(mixture, BPETokenizer(290), 8, 2)
    data.setup()
    for word in ("abcabd", "xyzxyw"):
        assert len(data.tokenizer.encode(word, add_bos=False, add_eos=False)) < 6


def test_a_source_with_nothing_to_train_on_is_refused(tmp_path):
    sources = {"many": NumberedSource([5] * 50), "one": NumberedSource([5], first=5003)}
    with pytest.raises(ConfigError, match=r"data\.sources\.one=one: has no document to train on"):
        module(MixtureSource(sources, {"many": 1, "one": 1}), val_fraction=0.9)


def test_other_weights_are_noticed_at_resume(tmp_path):
    def make(**weights):
        return module(MixtureSource({n: NumberedSource([5, 7] * 30, first=f) for n, f in NAMES}, weights))

    state = make(a=1, b=1).state_dict()
    make(a=2, b=2).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.weights=1:2: the checkpoint stopped at row 0 .* with weights 1:1"):
        make(a=1, b=2).load_state_dict(state)
    alone = module(NumberedSource([5, 7] * 30)).state_dict()
    with pytest.raises(ConfigError, match=r"data\.weights=1:1: .* of a run with weights None"):
        make(a=1, b=1).load_state_dict(alone)


NAMES = (("a", 1000), ("b", 3000))
