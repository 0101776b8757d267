"""eval.py's work from a checkpoint alone, against a slow plain computation, and what it refuses."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from samu_lm.data import BPETokenizer, ByteTokenizer, Tokenizer
from samu_lm.data.presets import text_data
from samu_lm.model import RecurrentLM
from tests.evaluation.making import run, save_checkpoint, small_model, text_config, write_corpus

ROOT = Path(__file__).resolve().parents[2]


def held_out_texts(config: dict[str, Any], tokenizer: Tokenizer) -> list[bytes]:
    """The validation documents in the source's order, found through the stored hashes."""
    from samu_lm.data.split import content_hash, held_out

    options = {key: value for key, value in config.items() if key != "_target_"}
    texts = list(text_data(tokenizer, **options).source.documents())
    chosen = held_out(np.array([content_hash(t) for t in texts], dtype=np.uint64), config["val_fraction"])
    return [text for text, is_val in zip(texts, chosen, strict=True) if is_val]


def plain_losses(model: RecurrentLM, texts: list[bytes], tokenizer: Tokenizer, seq_len: int) -> list[tuple[int, float]]:
    """(tokens read, nats) of every target: each piece of a document that a row holds is run by itself, in float64."""
    found, place = [], 0
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        begin = 0
        while begin < len(ids):
            end = min(begin + seq_len - place % seq_len, len(ids))
            logits = model(torch.tensor([ids[begin:end]])).detach().double()[0]
            for i in range(begin, end):
                if i + 1 < len(ids):
                    nats = -torch.log_softmax(logits[i - begin], dim=0)[ids[i + 1]]
                    found.append((i - begin + 1, float(nats)))
            place, begin = place + end - begin, end
    return found


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["samu", "rglru", "gated_delta"])
def test_figures_equal_a_plain_computation(mixer: str, corpus: Path, tmp_path: Path) -> None:
    model, config = small_model(mixer=mixer), text_config(corpus)
    saved = save_checkpoint(tmp_path / "last.ckpt", config, model=model, mixer=mixer)
    result = run(saved, tmp_path / "out")

    texts = held_out_texts(config, ByteTokenizer())
    plain = plain_losses(model, texts, ByteTokenizer(), config["seq_len"])
    assert len(texts) > 3
    assert max(map(len, texts)) > 3 * config["seq_len"], "a document of several rows"
    nats = math.fsum(loss for _, loss in plain)
    assert result["documents"] == len(texts)
    assert result["tokens"] == sum(map(len, texts)) + 2 * len(texts)  # BOS and EOS
    assert result["targets"] == len(plain) == result["tokens"] - result["documents"]
    assert result["bytes"] == sum(map(len, texts))
    assert result["nats"] == pytest.approx(nats, rel=1e-6)
    assert result["nats_per_token"] == pytest.approx(nats / len(plain), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / len(plain)), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, texts)), rel=1e-6)
    rows = math.ceil(result["tokens"] / config["seq_len"])
    assert result["rows"] == rows
    for b in result["by_position"]:
        values = [loss for position, loss in plain if b["first"] <= position <= b["last"]]
        assert b["targets"] == len(values)
        assert b["nats_per_token"] == pytest.approx(math.fsum(values) / len(values), rel=1e-5)
        if len(values) > 1:
            assert b["standard_error"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), rel=1e-4)
    assert sum(b["targets"] for b in result["by_position"]) == result["targets"]
    assert math.fsum(b["nats"] for b in result["by_position"]) == pytest.approx(result["nats"], rel=1e-12)
    assert max(b["last"] for b in result["by_position"]) == config["seq_len"]


def test_unigram_floor_by_hand(tmp_path: Path) -> None:
    # Whichever document is held out, its bytes are a:4 b:2 c:1 d:1, an entropy of 1.75 bits.
    (tmp_path / "texts").mkdir()
    for name in ("aaaabbcd", "dcbbaaaa", "aabbaacd"):
        (tmp_path / "texts" / name).write_text(name)
    saved = save_checkpoint(tmp_path / "last.ckpt", text_config(tmp_path / "texts"))
    result = run(saved, tmp_path / "out")
    assert result["unigram_bits_per_byte"] == pytest.approx(1.75, abs=1e-12)
    assert result["ratio_to_unigram"] == pytest.approx(result["bits_per_byte"] / 1.75)


def test_bits_per_byte_with_a_learnt_vocabulary(corpus: Path, tmp_path: Path) -> None:
    """Tokens of several bytes: the figures per byte are about the text, those per token about the tokens."""
    config = text_config(corpus)
    tokenizer = BPETokenizer(vocab_size=300)
    texts = held_out_texts(config, ByteTokenizer())
    tokenizer.train(texts)
    model = small_model(vocab_size=tokenizer.vocab_size)
    learnt = {"_target_": "samu_lm.data.BPETokenizer", "vocab_size": 300}
    saved = save_checkpoint(tmp_path / "last.ckpt", config, model=model, tokenizer=tokenizer, tokenizer_config=learnt)
    result = run(saved, tmp_path / "out")
    plain = plain_losses(model, texts, tokenizer, config["seq_len"])
    nats = math.fsum(loss for _, loss in plain)
    assert result["targets"] == len(plain) < sum(map(len, texts))
    assert result["bytes"] == sum(map(len, texts))
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, texts)), rel=1e-6)


def test_batch_size_changes_nothing(saved: Path, tmp_path: Path) -> None:
    results = [run(saved, tmp_path / str(size), f"data.batch_size={size}") for size in (1, 3, 64)]
    exact = ("targets", "bytes", "documents", "tokens", "rows", "continued_rows")
    for result in results[1:]:
        assert {key: result[key] for key in exact} == {key: results[0][key] for key in exact}
        assert result["nats"] == pytest.approx(results[0]["nats"], rel=1e-6)
        for ours, theirs in zip(result["by_position"], results[0]["by_position"], strict=True):
            assert ours["nats"] == pytest.approx(theirs["nats"], rel=1e-5)


def test_compiled_equals_uncompiled(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(saved, tmp_path / "plain")
    calls = []

    def compile_(function: Any) -> Any:
        calls.append(function)
        return original(function, backend="eager")  # traced as for inductor, without building code from it

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    compiled = run(saved, tmp_path / "compiled", "compile=true")
    assert len(calls) == 1
    assert compiled["nats"] == pytest.approx(plain["nats"], rel=1e-6)
    assert compiled["targets"] == plain["targets"]


def test_logits_in_pieces_change_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(saved, tmp_path / "whole")
    monkeypatch.setattr("samu_lm.evaluation.perplexity.LOGITS_AT_ONCE", 258 * 7)
    assert run(saved, tmp_path / "cut")["nats"] == pytest.approx(whole["nats"], rel=1e-6)


def test_first_rows_only(saved: Path, tmp_path: Path) -> None:
    whole = run(saved, tmp_path / "whole")
    assert whole["rows"] > 6
    part = run(saved, tmp_path / "part", "max_rows=6", "data.batch_size=4")
    assert part["rows"] == 6
    assert part["tokens"] == 6 * 32
    again = run(saved, tmp_path / "again", "max_rows=6", "data.batch_size=1")
    assert part["nats"] == pytest.approx(again["nats"], rel=1e-6)
    assert part["documents"] < whole["documents"]
    assert any("first rows" in note for note in part["notes"])
    assert not any("first rows" in note for note in whole["notes"])


def test_train_split(saved: Path, corpus: Path, tmp_path: Path) -> None:
    result = run(saved, tmp_path / "train", "split=train")
    held_out = run(saved, tmp_path / "val")
    texts = [path.read_bytes() for path in corpus.iterdir()]
    assert result["documents"] + held_out["documents"] == len(texts)
    assert result["bytes"] + held_out["bytes"] == sum(map(len, texts))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_is_the_trained_one_unless_set(precision: str, corpus: Path, saved: Path, tmp_path: Path) -> None:
    full = run(saved, tmp_path / "full")
    assert full["precision"] == "32-true"
    half = run(save_checkpoint(tmp_path / "half.ckpt", text_config(corpus), precision=precision), tmp_path / "half")
    assert half["precision"] == precision
    assert half["nats"] != full["nats"]
    assert half["nats"] == pytest.approx(full["nats"], rel=2e-2)
    again = run(tmp_path / "half.ckpt", tmp_path / "again", "precision=32-true")
    assert again["nats"] == full["nats"]


def test_a_checkpoint_from_before_the_stream_s_key_had_a_float32_stream(corpus: Path, tmp_path: Path) -> None:
    def nats(name: str, **model: Any) -> float:
        path = save_checkpoint(tmp_path / f"{name}.ckpt", text_config(corpus), precision="bf16-mixed", **model)
        return float(run(path, tmp_path / name)["nats"])

    older = nats("older")
    assert older == nats("wide", residual_in_float32=True)
    assert older != nats("narrow", residual_in_float32=False)


# -- what comes from the checkpoint, what may be set ----------------------------------------------------------------


def test_checkpoint_alone_from_another_folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run(saved, tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy.ckpt").write_bytes(saved.read_bytes())
    there = run(Path("copy.ckpt"), Path("there"))  # both relative to the launch folder
    assert (tmp_path / "there" / "evaluation.json").is_file()
    assert there["checkpoint"] == str(tmp_path / "copy.ckpt")
    assert {k: there[k] for k in ("nats", "step", "epoch")} == {"nats": here["nats"], "step": 40, "epoch": 2}


def test_other_data_keeps_how_rows_are_cut(saved: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", documents=12)
    chosen = run(saved, tmp_path / "chosen", "data=text", f"data.path={other}", "data.val_fraction=0.5")
    assert chosen["seq_len"] == 32
    assert str(other) in chosen["data"]
    longer = run(
        saved, tmp_path / "longer", "data=text", f"data.path={other}", "data.val_fraction=0.5", "data.seq_len=48"
    )
    assert longer["seq_len"] == 48
    assert longer["bytes"] == chosen["bytes"]
    moved = run(saved, tmp_path / "moved", f"data.path={other}", "data.val_fraction=0.5")
    assert moved["nats"] == chosen["nats"]


def test_equal_overrides_pass(saved: Path, tmp_path: Path) -> None:
    run(saved, tmp_path / "a", "model.width=16", "model.vocab_size=258", "tokenizer=bytes", "model.backend=reference")
    run(saved, tmp_path / "b", "model.vocab_size=null", "tokenizer.add_bos=true")


# -- what is written and printed ------------------------------------------------------------------------------------


def test_files_and_table(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(saved, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written == result
    assert written["checkpoint"] == str(saved)
    assert written["environment"]["command"]
    assert written["environment"]["packages"]["torch"] == torch.__version__
    picture = imread(tmp_path / "out" / "loss_by_position.png")
    assert min(picture.shape[:2]) > 500
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20, "something is drawn"
    shown = capsys.readouterr().out
    for figure in (
        f"{result['nats_per_token']:.4f}",
        f"{result['bits_per_byte']:.4f}",
        f"{result['unigram_bits_per_byte']:.4f}",
        f"{result['targets']:,}",
        "inside a document; there state and position start afresh",
        "evaluation.json, loss_by_position.png",
    ):
        assert figure in shown
    assert max(map(len, shown.splitlines()[:-1])) < 100


def test_sampling_reads_no_data(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = save_checkpoint(tmp_path / "gone.ckpt", text_config(tmp_path / "removed"))
    result = run(gone, tmp_path / "out", "prompt='hi there'", "num_samples=2", "max_new_tokens=9", "seed=4")
    again = run(gone, tmp_path / "again", "prompt='hi there'", "num_samples=2", "max_new_tokens=9", "seed=4")
    assert json.loads((tmp_path / "out" / "samples.json").read_text()) == result
    assert [s["text"] for s in result["samples"]] == [s["text"] for s in again["samples"]]
    assert [s["seed"] for s in result["samples"]] == [4, 5]
    assert result["prompt_tokens"] == [256, *b"hi there"]
    for sample in result["samples"]:
        assert len(sample["tokens"]) <= 9
        assert sample["text"] == bytes([*b"hi there", *sample["tokens"]]).decode(errors="replace")
        assert sample["ended"] is (len(sample["tokens"]) < 9)
    assert "sample 2 of 2" in capsys.readouterr().out


def test_text_cut_inside_a_character_is_shown(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samu_lm.evaluation.run.generate", lambda *a, **k: [[0xC3], [0xC3, 0xA9]])
    result = run(saved, tmp_path / "out", "prompt='caf'", "num_samples=2")
    assert [s["text"] for s in result["samples"]] == ["caf\ufffd", "café"]


def test_empty_prompt(saved: Path, corpus: Path, tmp_path: Path) -> None:
    result = run(saved, tmp_path / "out", "prompt=", "max_new_tokens=3")
    assert result["prompt_tokens"] == [256]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_entry_point_evaluates(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without output= the results lie in the folder of Hydra's run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # put back afterwards
    monkeypatch.setattr(sys, "argv", ["eval.py", f"checkpoint={saved}", "hydra.run.dir=out", "max_rows=2"])
    runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["rows"] == 2
