"""`samu-lm prepare`: what it takes, prints and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from samu_lm.cli import main
from samu_lm.config import config_dir
from samu_lm.prepare import ProgressLine, build, compose_config
from tests.data.preparing import jsonl, sources, texts


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return jsonl(tmp_path / "corpus.jsonl", texts(40))


def test_a_corpus_is_prepared_and_what_it_holds_is_said(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths are relative to the folder that the command was started in."""
    assert main(["prepare", "data=jsonl", "data.path=corpus.jsonl", "out=shards", "workers=0"]) == 0
    manifest = json.loads(Path("shards/manifest.json").read_text())
    printed = capsys.readouterr().out
    assert f"39 documents, {manifest['bytes']:,} bytes of text, {manifest['tokens']:,} tokens" in printed
    assert "left out: 1 empty, 0 faulty" in printed
    assert "train with: python train.py data=shards data.path=shards" in printed
    assert manifest["source"]["files"][0]["path"] == str(corpus)


@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet", "hub", "stdlib"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_source_with_every_kind_of_tokenizer(tmp_path: Path, kind: str, tokenizer: str) -> None:
    place = {"stdlib": "data.max_bytes=20000", "hub": f"data.name={tmp_path / 'c' / 'hub'}"}
    sources(tmp_path / "c")
    overrides = [f"data={kind}", place.get(kind, f"data.path={tmp_path / 'c' / kind}"), f"tokenizer={tokenizer}"]
    if kind in ("jsonl", "parquet"):
        overrides.append("data.on_error=skip")
    if tokenizer == "bpe":
        overrides.append("tokenizer.vocab_size=300")
    assert main(["prepare", *overrides, f"out={tmp_path / 'out'}", "workers=0"]) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["documents"] >= 2
    assert manifest["tokenizer"]["kind"] == tokenizer


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=jsonl", "data.path=corpus.jsonl"], r"out=\?\?\?: has no value; give one with out="),
        (["out="], "out=: give the folder to write the shards to"),
        (["data=jsonl"], r"data\.path=None: give a file"),
        (["data=jsonl", "data.path=nowhere"], r"data\.path=nowhere: no such file or folder"),
        (["data=json"], r"data=json: no such choice; did you mean jsonl\?"),
        (["dat=jsonl"], r"dat=jsonl: unknown key; did you mean data\?"),
        (["data=jsonl", "data.pth=x"], r"data\.pth=x: unknown key; did you mean data\.path\?"),
        (["+data.pth=x"], r"data\.pth=x: unknown key"),
        (["data=jsonl", "data.path=[corpus.jsonl"], r"data\.path=\[corpus\.jsonl: cannot be read"),
        (["data.max_bytes=many"], r"data\.max_bytes=many: wrong type str"),
        (["data=jsonl", "data.path=corpus.jsonl", "data.text_key=body"], r"data\.text_key=body: .* no such key"),
        (["tokenizer=null"], "tokenizer=null: choose one of bpe, bytes, pretrained, shards"),
        (["tokenizer=bpe", "tokenizer.vocab_size=3"], r"tokenizer\.vocab_size=3: give at least 258"),
        (["tokenizer=pretrained"], r"tokenizer\.path=None: give a tokenizer\.json"),
        (["workers=-1"], "workers=-1: give a whole number, 0 or more"),
        (["shard_tokens=0"], "shard_tokens=0: give a whole number, 1 or more"),
        (["shard_tokens=null"], "shard_tokens=None: give a whole number, 1 or more"),
        (["data=shards"], "data=shards: has no texts to tokenize; prepare stdlib, text, jsonl, parquet or hub"),
        (["data=mixture"], "data=mixture: has no texts to tokenize"),
        (["data=text", "data.path=.", "out=./x"], r"out=.*x: lies in the corpus' own folder"),
        (["data.val_fraction=2"], r"data\.val_fraction=2: give a number between 0 and 1"),
    ],
)
def test_refused_in_one_line_before_anything_is_written(
    corpus: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    own = [] if message.startswith("out=") else ["out=shards"]
    assert main(["prepare", *overrides, *own]) == 2
    error = capsys.readouterr().err
    assert re.search(f"^samu-lm prepare: {message}", error), error
    assert error.count("\n") == 1
    assert sorted(p.name for p in Path().iterdir()) == ["corpus.jsonl"]


def test_every_group_of_data_and_tokenizer_composes_with_prepare() -> None:
    for group in ("data", "tokenizer"):
        for file in sorted((config_dir() / group).glob("*.yaml")):
            with initialize_config_dir(str(config_dir()), version_base="1.3"):
                assert "_target_" in compose("prepare", [f"{group}={file.stem}", "out=x"])[group]


def test_tokenizing_needs_neither_pytorch_nor_lightning(corpus: Path) -> None:
    """Their memory, in each process, would be most of what preparing takes."""
    arguments = ["prepare", "data=jsonl", "data.path=corpus.jsonl", "tokenizer=bpe", "out=shards", "workers=0"]
    code = (
        f"import sys; from samu_lm.cli import main; status = main({arguments}); "
        "sys.exit(status or ','.join(m for m in ('torch', 'lightning', 'transformers') if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_data_settings_reach_the_source(corpus: Path) -> None:
    cfg = compose_config(["data=hub", "data.name=some/set", "data.split='train[:1%]'", "out=x"])
    from samu_lm.data.presets import source_of

    source = source_of(__import__("samu_lm.data", fromlist=["hub_data"]).hub_data, dict(cfg.data))
    assert (source.dataset, source.split) == ("some/set", "train[:1%]")  # type: ignore[union-attr]
    cfg = compose_config(["data=text", "data.path=corpus.jsonl", 'data.separator=";"', "out=x"])
    assert build(cfg)[0].separator == ";"  # type: ignore[attr-defined]


def test_ctrl_c_says_how_to_go_on(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import samu_lm.data.preparation

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(samu_lm.data.preparation, "prepare_shards", interrupt)
    assert main(["prepare", "data=jsonl", "data.path=corpus.jsonl", "out=shards"]) == 130
    assert re.search("stopped; run the same command to go on in .*shards", capsys.readouterr().err)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    from samu_lm.data.preparation import Progress

    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    line = ProgressLine()
    for seconds in (101.0, 102.0, 111.0):
        now[0] = seconds
        line.show(Progress(1500, 3_000_000, 3_100_000, 1_000_000, (30, 120)))
    line.end()
    shown = capsys.readouterr().err
    if terminal:
        assert shown.count("\r") == 4
        assert "[#####               ]  25% 1,500 documents, 3 MB of text, 3,100,000 tokens, 2.0 MB/s" in shown
    else:
        assert shown == " 25% 1,500 documents, 3 MB of text, 3,100,000 tokens, 0.2 MB/s\n"
