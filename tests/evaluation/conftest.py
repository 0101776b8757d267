"""A corpus of text files and a checkpoint trained on it, shared by the tests; nothing writes to either."""

from pathlib import Path

import pytest

from tests.evaluation.making import save_checkpoint, text_config, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="session")
def saved(corpus: Path) -> Path:
    return save_checkpoint(corpus.parent / "run" / "checkpoints" / "last.ckpt", text_config(corpus))
