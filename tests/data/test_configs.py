"""Every file of configs/data and configs/tokenizer makes what it says."""

from pathlib import Path

import pytest
import yaml
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from samu_lm.data import LMDataModule, Tokenizer
from samu_lm.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
TOKENIZERS = sorted((CONFIGS / "tokenizer").glob("*.yaml"))


def load(file, **changes):
    node = OmegaConf.load(file)
    node.pop("defaults", None)
    node = OmegaConf.merge({"seed": 7, "node": node}, {"node": changes})
    return node.node


def test_the_groups_are_complete():
    assert [f.stem for f in DATA] == [
        *("hub", "jsonl", "mixture", "parquet", "shards", "stdlib", "stdlib_slice", "text"),
    ]
    assert [f.stem for f in TOKENIZERS] == ["bpe", "bytes", "pretrained", "shards"]


@pytest.mark.parametrize("file", [*DATA, *TOKENIZERS], ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_every_argument_is_a_key_and_every_key_an_argument(file):
    import inspect

    node = yaml.safe_load(file.read_text())
    node.pop("defaults", None)
    arguments = set(inspect.signature(get_object(node.pop("_target_"))).parameters)
    assert set(node) == arguments - {"tokenizer"}


@pytest.mark.parametrize("file", DATA, ids=lambda f: f.stem)
@pytest.mark.parametrize("tokenizer_file", [f for f in TOKENIZERS if f.stem != "shards"], ids=lambda f: f.stem)
def test_files_instantiate_without_reading_anything(file, tokenizer_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = instantiate(load(tokenizer_file))
    data = instantiate(load(file), tokenizer=tokenizer)
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(data, LMDataModule)
    assert data.tokenizer is tokenizer
    assert (data.seq_len, data.batch_size, data.seed, data.num_workers) == (512, 8, 7, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", r"data\.path=None: give a file"),
        ("jsonl", r"data\.path=None: give a file"),
        ("parquet", r"data\.path=None: give a file"),
        ("hub", r"data\.name=None: give a dataset"),
        ("shards", r"data\.path=None: give a folder that samu-lm prepare wrote"),
        ("mixture", r"data\.sources=None: name at least one"),
    ],
)
def test_a_source_without_its_place_says_so(name, message):
    data = instantiate(load(CONFIGS / "data" / f"{name}.yaml"), tokenizer=instantiate(load(TOKENIZERS[1])))
    with pytest.raises(ConfigError, match=message):
        data.check()


def test_the_default_corpus_passes_its_check():
    instantiate(load(CONFIGS / "data" / "stdlib.yaml"), tokenizer=instantiate(load(TOKENIZERS[1]))).check()


def test_lists_and_options_arrive(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}1;{name}2")
    node = load(CONFIGS / "data" / "text.yaml", path=[str(tmp_path / "b"), str(tmp_path / "a")], separator=";")
    data = instantiate(node, tokenizer=instantiate(load(TOKENIZERS[1])))
    assert list(data.source.documents()) == [b"b1", b"b2", b"a1", b"a2"]
