"""`samu-lm export`: safetensors, config and tokenizer out of a checkpoint, and back, to the same logits."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from samu_lm.checkpoint import exported
from samu_lm.cli import main
from samu_lm.data import tokenizer_from_state
from samu_lm.errors import ConfigError
from samu_lm.evaluation.build import build_model
from samu_lm.evaluation.checkpoint import load_checkpoint
from samu_lm.training.run import run
from tests.training.support import differences, load, tiny_config, train_tiny, write_corpus


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's last checkpoint, with either kind of tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    kind = ["tokenizer=bpe", "tokenizer.vocab_size=280"] if request.param == "bpe" else []
    train_tiny(tiny_config(write_corpus(folder), *kind, "trainer.max_steps=3"), folder)
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    assert main(["export", f"checkpoint={checkpoint}", f"out={tmp_path}/out"]) == 0
    return tmp_path / "out"


def logits(path: Path) -> torch.Tensor:
    """The logits of the model that eval.py builds from a checkpoint."""
    loaded = load_checkpoint(path)
    tokenizer = tokenizer_from_state(loaded.tokenizer)
    ids = torch.as_tensor(tokenizer.encode("alpha beta gamma"))[None]
    with torch.no_grad():
        return build_model(loaded, tokenizer, {})(ids)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["export", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("samu-lm export: ")


def test_the_folder_is_what_is_documented(folder: Path, checkpoint: Path) -> None:
    own = load(checkpoint)["samu_lm"]
    names = {"model.safetensors", "config.json", "tokenizer_config.json"}
    names |= {"tokenizer.json"} if own["tokenizer"]["kind"] == "bpe" else set()
    assert {p.name for p in folder.iterdir()} == names
    assert json.loads((folder / "config.json").read_text())["config"] == own["config"]
    if "tokenizer.json" in names:
        from tokenizers import Tokenizer

        assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == 278  # without BOS and EOS


def test_the_tied_embedding_is_stored_once(folder: Path, checkpoint: Path) -> None:
    weights = load(checkpoint)["state_dict"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    assert differences({f"model.{name}": tensor for name, tensor in stored.items()}, dict(weights)) == []
    embedding = weights["model.embedding.weight"]
    assert [name for name, tensor in stored.items() if tensor.shape == embedding.shape] == ["embedding.weight"]
    bytes_of_weights = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    assert (folder / "model.safetensors").stat().st_size < bytes_of_weights + 8192


def test_the_logits_survive_the_way_there_and_back(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = logits(checkpoint)
    assert torch.equal(logits(folder), expected)
    back = tmp_path / "back.ckpt"
    assert main(["export", f"checkpoint={folder}", f"out={back}"]) == 0
    assert capsys.readouterr().out == f"{back}\n"
    assert torch.equal(logits(back), expected)
    original, returned = load(checkpoint), load(back)
    for part in ("state_dict", "samu_lm", "global_step"):
        assert differences(returned[part], original[part]) == []


def test_a_run_does_not_go_on_from_weights_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^resume=.*out: holds weights without the optimizer's state"):
        run(tiny_config(write_corpus(tmp_path), f"resume={folder}"), tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=a.ckpt"], "out=(nothing): is missing; give out=PATH\n"),
        (["out=x", "checkpoint="], "checkpoint=: is missing; give checkpoint=PATH\n"),
        (["ckpt=a.ckpt"], "ckpt=a.ckpt: unknown key; give checkpoint=PATH and out=PATH\n"),
        (["a.ckpt"], "a.ckpt=(nothing): unknown key; give checkpoint=PATH and out=PATH\n"),
        (["checkpoint=absent.ckpt", "out=x"], "checkpoint=absent.ckpt: no such file; "),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *arguments).startswith(message)


def test_nothing_is_written_over(folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in folder.iterdir()}
    assert refusal(capsys, f"checkpoint={checkpoint}", f"out={folder}") == f"out={folder}: exists; give a new path\n"
    assert before == {p: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("name", ["out", "out.ckpt"])
def test_a_full_disk_leaves_nothing(
    checkpoint: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = refusal(capsys, f"checkpoint={checkpoint}", f"out={tmp_path / name}")
    assert message.startswith(f"out={tmp_path / name}: cannot be written (No space left on device)")
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file where a folder should be, and whatever the weights' own writer raises."""
    (tmp_path / "file").write_text("")
    for name in ("file/out", "file/out.ckpt"):
        assert "cannot be written" in refusal(capsys, f"checkpoint={checkpoint}", f"out={tmp_path / name}")

    def failing(*args: object, **kwargs: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    assert "No space left" in refusal(capsys, f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_export_left_is_no_hindrance(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
    assert main(["export", f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_changed_tokenizer_is_refused(folder: Path) -> None:
    names = [name for name in (exported.TOKENIZER, exported.TOKENIZER_CONFIG) if (folder / name).exists()]
    for name in names:
        whole = (folder / name).read_text()
        (folder / name).write_text(whole + " ")
        with pytest.raises(ConfigError, match=f"is damaged in {name}"):
            load_checkpoint(folder)
        (folder / name).unlink()
        with pytest.raises(ConfigError, match=f"it lacks {name}"):
            load_checkpoint(folder)
        (folder / name).write_text(whole)
    load_checkpoint(folder)


def test_damage_is_refused(folder: Path) -> None:
    def message() -> str:
        with pytest.raises(ConfigError) as error:
            load_checkpoint(folder)
        assert str(error.value).startswith(f"checkpoint={folder}: ")
        return str(error.value)

    weights = folder / exported.WEIGHTS
    whole = bytearray(weights.read_bytes())
    whole[-1] ^= 1
    weights.write_bytes(whole)
    assert "is damaged in model.safetensors" in message()
    (folder / exported.CONFIG).write_text("{}")
    assert "cannot be read as an exported model" in message()
    (folder / exported.TOKENIZER_CONFIG).unlink()
    assert "is incomplete: it lacks tokenizer_config.json" in message()


def test_another_program_s_folder(tmp_path: Path) -> None:
    content: dict[str, Any] = {"architectures": ["RecurrentGemmaForCausalLM"]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot be read as an exported model \(KeyError: 'sha256'\)"):
        load_checkpoint(tmp_path)
