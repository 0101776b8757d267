from __future__ import annotations

from pathlib import Path

import pytest

from samu_lm.errors import ConfigError
from samu_lm.training.callbacks import PlainProgress
from tests.training.support import tiny_config, train_tiny, write_corpus


def test_a_line_every_few_steps_when_the_output_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = ["callbacks.progress.every_n_steps=3", "trainer.max_steps=7", "trainer.val_check_interval=6"]
    train_tiny(tiny_config(write_corpus(tmp_path), *settings), tmp_path / "run")
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("progress")]
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 6", "step 7/7", "step 7"]
    assert "loss" in lines[0]
    assert "tokens/s" in lines[0]
    assert "validation loss" in lines[2]
    assert "bits/byte" in lines[2]


def test_silent_on_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = ["+callbacks.progress.terminal=true", "trainer.max_steps=3", "callbacks.progress.every_n_steps=1"]
    cfg = tiny_config(write_corpus(tmp_path), *settings)
    callback = PlainProgress(every_n_steps=1, terminal=True)
    del cfg.callbacks.progress
    train_tiny(cfg, tmp_path / "run", callback)
    assert not [r for r in caplog.records if r.name.endswith("progress")]


def test_refuses_an_interval_below_one() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\.progress\.every_n_steps=0: must be at least 1"):
        PlainProgress(every_n_steps=0)
