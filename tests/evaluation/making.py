"""Small checkpoints in the saved format, with text data beside them, and configs as eval.py composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import samu_lm.evaluation.command_line  # noqa: F401  registers the open groups of eval.yaml
from samu_lm.config import config_dir
from samu_lm.data import ByteTokenizer, Tokenizer
from samu_lm.evaluation.run import evaluate
from samu_lm.model import RecurrentLM

SIZES: dict[str, Any] = {"width": 16, "rnn_width": 32, "depth": 2, "mixer": "samu", "num_blocks": 4}
SENTENCE = "the state of a recurrence is carried from token to token until a reset ends it; naïve œuvre"
WORDS = SENTENCE.split(" ")


def write_corpus(folder: Path, documents: int = 24) -> Path:
    """Text files of different lengths, from one character to several rows."""
    folder.mkdir(parents=True)
    for i in range(documents):
        words = [WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(i * i % 41)]
        (folder / f"{i:02}.txt").write_text(" ".join([str(i), *words]), encoding="utf-8")
    return folder


def text_config(path: Path, **changes: Any) -> dict[str, Any]:
    """The data node of a run on text files, resolved."""
    node = {
        "_target_": "samu_lm.data.text_data",
        "path": str(path),
        "separator": None,
        "newline": "lf",
        "on_error": "raise",
        "seq_len": 32,
        "batch_size": 4,
        "val_fraction": 0.4,
        "num_workers": 0,
        "cache_dir": None,
        "seed": 3,
    }
    return node | changes


def small_model(vocab_size: int = 258, **sizes: Any) -> RecurrentLM:
    """Always the same model, away from its start, where SAMU's controls and the norms do nothing yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = RecurrentLM(vocab_size, **SIZES | sizes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def save_checkpoint(
    path: Path,
    data: dict[str, Any],
    *,
    model: RecurrentLM | None = None,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    precision: str = "32-true",
    **model_config: Any,
) -> Path:
    """Writes a checkpoint as training does."""
    model, tokenizer = model or small_model(), tokenizer or ByteTokenizer()
    default_tokenizer = {"_target_": "samu_lm.data.ByteTokenizer", "add_bos": True, "add_eos": True}
    config = {
        "model": {
            "_target_": "samu_lm.model.RecurrentLM",
            "vocab_size": None,
            **SIZES,
            "backend": "auto",
            **model_config,
        },
        "data": data,
        "tokenizer": tokenizer_config or default_tokenizer,
        "trainer": {"precision": precision},
        "seed": 3,
    }
    content = {
        "state_dict": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        "global_step": 40,
        "epoch": 2,
        "pytorch-lightning_version": "2.6.0",
        "samu_lm": {"format": 1, "config": config, "tokenizer": tokenizer.state_dict()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def composed(*overrides: str) -> DictConfig:
    """eval.yaml with overrides, as on the command line."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("eval", overrides=list(overrides))


def run(checkpoint: Path, output: Path, *overrides: str) -> dict[str, Any]:
    """Evaluates as `eval.py checkpoint=... output=... OVERRIDES` does."""
    return evaluate(composed(f"checkpoint={checkpoint}", f"output={output}", *overrides))
