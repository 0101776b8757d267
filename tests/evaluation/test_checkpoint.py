"""Reading checkpoints back: what fits loads strictly, everything else is one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samu_lm.errors import ConfigError
from samu_lm.evaluation.checkpoint import load_checkpoint, load_weights, merge_known, refuse_contradictions
from samu_lm.model import RecurrentLM

SIZES = {"width": 16, "rnn_width": 32, "depth": 2}


def small_model() -> RecurrentLM:
    return RecurrentLM(258, **SIZES)


def on_meta() -> RecurrentLM:
    with torch.device("meta"):
        return small_model()


def content(model: RecurrentLM) -> dict[str, Any]:
    """A checkpoint's content in the saved format."""
    return {
        "state_dict": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        "global_step": 7,
        "epoch": 1,
        "pytorch-lightning_version": "2.6.0",
        "samu_lm": {"format": 1, "config": {"model": dict(SIZES)}, "tokenizer": {"kind": "bytes"}},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    torch.save(content(small_model()), path)
    return path


def altered(path: Path, **parts: Any) -> Path:
    """A copy of a checkpoint with top-level parts replaced."""
    changed = path.with_name("altered.ckpt")
    torch.save(torch.load(path, weights_only=True) | parts, changed)
    return changed


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_checkpoint(path)
    message = str(error.value)
    assert message.startswith(f"checkpoint={path}: ")
    assert "\n" not in message
    return message


def test_content_comes_back(saved: Path) -> None:
    checkpoint = load_checkpoint(saved)
    assert (checkpoint.step, checkpoint.epoch, checkpoint.path) == (7, 1, saved)
    assert checkpoint.config == {"model": SIZES}
    assert checkpoint.tokenizer == {"kind": "bytes"}
    model = on_meta()
    load_weights(model, checkpoint)
    stored = torch.load(saved, weights_only=True)["state_dict"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[f"model.{name}"])
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]]))).all()


def test_missing_and_folder(saved: Path, tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.ckpt")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert "is a folder" in refusal(run)
    saved.rename(run / "checkpoints" / "last.ckpt")
    assert str(run / "checkpoints" / "last.ckpt") in refusal(run).partition(": ")[2]


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9, 0.999])
def test_truncated(saved: Path, kept: float) -> None:
    whole = saved.read_bytes()
    cut = saved.with_name("cut.ckpt")
    cut.write_bytes(whole[: int(len(whole) * kept)])
    assert "truncated" in refusal(cut)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    for name, data, reason in [
        ("empty.ckpt", b"", "is empty"),
        ("text.ckpt", b"hello, world\n", "is not a checkpoint"),
        ("pickle.ckpt", b"\x80\x04K\x01.", "is not a checkpoint"),
    ]:
        (tmp_path / name).write_bytes(data)
        assert reason in refusal(tmp_path / name)
    import zipfile

    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "no tensors here")
    assert "cannot be read as a checkpoint" in refusal(tmp_path / "other.zip")


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_code_in_the_file_is_not_run(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.load(saved, weights_only=True) | {"extra": Payload()}, tmp_path / "evil.ckpt")
    assert "holds more than plain values" in refusal(tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists()


def test_damage_in_the_middle(saved: Path) -> None:
    """Weights that changed on the disk are refused, although the file's structure is whole."""
    content = bytearray(saved.read_bytes())
    weight = torch.load(saved, weights_only=True)["state_dict"]["model.embedding.weight"].numpy().tobytes()
    place = content.index(weight[:64])
    content[place : place + 64] = bytes(64)
    damaged = saved.with_name("damaged.ckpt")
    damaged.write_bytes(content)
    assert "is damaged" in refusal(damaged)


def test_other_programs_and_formats(saved: Path) -> None:
    other = saved.with_name("other.ckpt")
    torch.save({"state_dict": {}}, other)
    assert "not a checkpoint that train.py wrote" in refusal(other)
    torch.save([1, 2], other)
    assert "not a checkpoint that train.py wrote" in refusal(other)
    own = torch.load(saved, weights_only=True)["samu_lm"]
    message = refusal(altered(saved, samu_lm=own | {"format": 2}))
    assert "format 2" in message
    assert "format 1" in message
    assert "holds no tokenizer" in refusal(altered(saved, samu_lm=own | {"tokenizer": {}}))
    without = {k: v for k, v in own.items() if k != "tokenizer"}
    assert "not a checkpoint that train.py wrote" in refusal(altered(saved, samu_lm=without))
    assert "holds no state_dict" in refusal(altered(saved, state_dict={}))


def test_compile_prefix_and_foreign_weights_are_not_accepted(saved: Path) -> None:
    weights = torch.load(saved, weights_only=True)["state_dict"]
    foreign = altered(saved, state_dict=weights | {"metric.total": torch.zeros(1)})
    assert "metric.total" in refusal(foreign)
    prefixed = altered(saved, state_dict={k.replace("model.", "model._orig_mod."): v for k, v in weights.items()})
    with pytest.raises(ConfigError, match="_orig_mod"):
        load_weights(on_meta(), load_checkpoint(prefixed))


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_are_refused_before_memory_is_taken(saved: Path, fault: str) -> None:
    weights = torch.load(saved, weights_only=True)["state_dict"]
    name = "model.final_norm.scale"
    assert name in weights
    if fault == "missing":
        del weights[name]
    elif fault == "extra":
        weights["model.final_norm.shift"] = weights[name]
    else:
        weights[name] = weights[name][:-1]
    model = on_meta()
    with pytest.raises(ConfigError, match=r"checkpoint=.*final_norm") as error:
        load_weights(model, load_checkpoint(altered(saved, state_dict=weights)))
    assert {"missing": "missing", "extra": "does not have", "shape": "another shape"}[fault] in str(error.value)
    assert model.embedding.weight.is_meta, "no memory is taken for weights that do not fit"


def test_contradictions_name_both_values() -> None:
    trained = {"width": 128, "mixer": "samu", "backend": "auto", "nested": {"a": 1}}
    refuse_contradictions("model", {"width": 128, "mixer": "samu", "nested": {"a": 1}}, trained)
    refuse_contradictions("model", {"backend": "reference"}, trained)
    with pytest.raises(ConfigError, match=r"^model\.width=64: .*128"):
        refuse_contradictions("model", {"width": 64}, trained)
    with pytest.raises(ConfigError, match=r"^model\.nested\.a=2: .*1"):
        refuse_contradictions("model", {"nested": {"a": 2}}, trained)
    with pytest.raises(ConfigError, match=r"^model\.widht=64: .*did you mean width\?"):
        refuse_contradictions("model", {"widht": 64}, trained)
    with pytest.raises(ConfigError, match=r"^tokenizer\.backend=x"):
        refuse_contradictions("tokenizer", {"backend": "x"}, {"backend": "y"})


def test_overrides_go_on_top_of_the_checkpoints_settings() -> None:
    trained = {"batch_size": 8, "seq_len": 256, "source": {"path": "a", "newline": "lf"}}
    merged = merge_known("data", trained, {"batch_size": 4, "source": {"path": "b"}})
    assert merged == {"batch_size": 4, "seq_len": 256, "source": {"path": "b", "newline": "lf"}}
    assert trained["batch_size"] == 8
    with pytest.raises(ConfigError, match=r"^data\.batchsize=4: .*did you mean batch_size\?"):
        merge_known("data", trained, {"batchsize": 4})
    with pytest.raises(ConfigError, match=r"^data\.source\.pth=b: .*did you mean path\?"):
        merge_known("data", trained, {"source": {"pth": "b"}})
