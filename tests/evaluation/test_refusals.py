"""What eval.py refuses: one line that names key, value and remedy, before data is read or a file written."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samu_lm.data import ByteTokenizer, LMDataModule
from samu_lm.errors import ConfigError, SamuLMError
from tests.evaluation.making import run, save_checkpoint, small_model, text_config

ROOT = Path(__file__).resolve().parents[2]


def refusal(saved: Path, output: Path, *overrides: str) -> str:
    """The message of an evaluation that must stop before it reads data or writes anything."""

    def reads(self: LMDataModule, stage: str | None = None) -> None:
        raise AssertionError("data is read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LMDataModule, "setup", reads)
        with pytest.raises(ConfigError) as error:
            run(saved, output, *overrides)
    assert not output.exists()
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.width=64"], r"model\.width=64: .*16"),
        (["model=rglru_tiny"], r"model\.\w+=\w+: the checkpoint was trained with"),
        (["model.mixer=rglru"], r"model\.mixer=rglru: .*samu"),
        (["model.vocab_size=300"], r"model\.vocab_size=300: .*258"),
        (["model.widht=16"], r"model\.widht=16: .*did you mean width\?"),
        (["tokenizer.add_eos=false"], r"tokenizer\.add_eos=False: .*True"),
        (["tokenizer=bpe"], r"tokenizer\._target_=samu_lm\.data\.BPETokenizer: .*ByteTokenizer"),
        (["data.batchsize=2"], r"data\.batchsize=2: .*did you mean batch_size\?"),
        (["data.seq_len=1"], r"data\.seq_len=1: "),
        (["data.seq_len=long"], r"data\.seq_len=long: wrong type str; must be int"),
        (["data=text"], r"data\.path=None: "),
        (["data=text", "data.path=/nowhere"], r"data\.path=/nowhere: no such file"),
        (["data=text", "data.pth=/nowhere"], r"data\.pth=/nowhere: .*no such key; did you mean path\?"),
        (["data=jsonl", "data.pth=/nowhere"], r"data\.pth=/nowhere: unknown key; did you mean path\?"),
        (["split=test"], r"split=test: choose val or train"),
        (["max_rows=0"], r"max_rows=0: "),
        (["max_rows=many"], r"max_rows=many: wrong type"),
        (["precision=fp8"], r"precision=fp8: choose one of 32-true"),
        (["device=tpu"], r"device=tpu: choose"),
        (["device=cuda:99"], r"device=cuda:99: there are \d+"),
        (["compile=maybe"], r"compile=maybe: wrong type"),
        (["prompt=12"], r"prompt=12: quote"),
        (["prompt=x", "temperature=-1"], r"temperature=-1: "),
        (["prompt=x", "top_k=0"], r"top_k=0: "),
        (["+surprise=1"], r"surprise=1: unknown key"),
        (["checkpoint=???"], r"checkpoint=\?\?\?: "),
    ],
)
def test_refused_before_data_is_read(overrides: list[str], expected: str, saved: Path, tmp_path: Path) -> None:
    message = refusal(saved, tmp_path / "out", *overrides)
    assert re.match(expected, message), message


def test_broken_checkpoints_are_refused(saved: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(saved.read_bytes()[:-200])
    assert refusal(cut, tmp_path / "out").startswith(f"checkpoint={cut}: ")
    assert "no such file" in refusal(tmp_path / "absent.ckpt", tmp_path / "out")
    content = torch.load(saved, weights_only=True)
    del content["state_dict"]["model.final_norm.scale"]
    torch.save(content, cut)
    assert "missing weights: final_norm.scale" in refusal(cut, tmp_path / "out")
    del content["samu_lm"]["config"]["model"]
    torch.save(content, cut)
    assert "holds no model" in refusal(cut, tmp_path / "out")


def test_odd_model_in_the_checkpoint_is_refused(corpus: Path, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "odd.ckpt", text_config(corpus), rnn_width=33)
    assert "cannot build its model (rnn_width=33" in refusal(saved, tmp_path / "out")


@pytest.mark.parametrize("target", ["os.system", "samu_lm.environment.subprocess.run"])
def test_code_named_by_a_checkpoint_is_not_run(target: str, saved: Path, tmp_path: Path) -> None:
    content = torch.load(saved, weights_only=True)
    for group in ("model", "data"):
        changed = {**content["samu_lm"]["config"][group], "_target_": target}
        config = content["samu_lm"]["config"] | {group: changed}
        torch.save(content | {"samu_lm": content["samu_lm"] | {"config": config}}, tmp_path / "evil.ckpt")
        message = refusal(tmp_path / "evil.ckpt", tmp_path / "out")
        assert f"its {group} is code outside samu_lm ({target})" in message


def test_results_of_another_run_are_not_overwritten(saved: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "evaluation.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"^output=.*already holds evaluation\.json"):
        run(saved, output)
    assert (output / "evaluation.json").read_text() == "mine"
    assert [path.name for path in output.iterdir()] == ["evaluation.json"]
    file = tmp_path / "file"
    file.write_text("a file")
    with pytest.raises(ConfigError, match=r"^output=.*cannot be written"):
        run(saved, file)


def test_weights_that_are_not_numbers_give_no_result(corpus: Path, tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.final_norm.scale[0] = math.nan
    saved = save_checkpoint(tmp_path / "nan.ckpt", text_config(corpus), model=model)
    with pytest.raises(SamuLMError, match="not finite"):
        run(saved, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_empty_prompt_without_bos(corpus: Path, tmp_path: Path) -> None:
    plain = {"_target_": "samu_lm.data.ByteTokenizer", "add_bos": False, "add_eos": True}
    without = save_checkpoint(
        tmp_path / "no_bos.ckpt", text_config(corpus), tokenizer=ByteTokenizer(add_bos=False), tokenizer_config=plain
    )
    assert "adds no BOS" in refusal(without, tmp_path / "none", "prompt=")


def test_exit_status_and_one_line(tmp_path: Path) -> None:
    checkpoint = tmp_path / "absent.ckpt"
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval.py"), f"checkpoint={checkpoint}", "hydra.run.dir=out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: checkpoint={checkpoint}: no such file; give a checkpoint, below a run's checkpoints/"
    ]
    assert not (tmp_path / "out" / "evaluation.json").exists()
