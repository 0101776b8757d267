"""The commands and code of README and docs run as written: train and evaluate commands on a model cut to seconds."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from samu_lm.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Sizes that make any training command a matter of seconds; put before the page's own arguments, which win.
SMALL_MODEL = ["model.width=16", "model.rnn_width=32", "model.depth=1"]
SMALL_RUN = [
    "data.seq_len=64", "data.batch_size=4", "trainer.accelerator=cpu", "trainer.limit_val_batches=2",
    "trainer.val_check_interval=4", "trainer.max_steps=8", "schedule.warmup_steps=2",
]  # fmt: skip
GPU_ONLY = ("trainer=gpu",)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def _commands(page: Path) -> list[str]:
    lines = "\n".join(_blocks(page, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(python (?:train|eval)\.py [^`]*)`", page.read_text())
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _training_arguments(arguments: list[str]) -> list[str]:
    """The page's arguments with its step counts divided by ten and everything else small."""
    scaled = [
        re.sub(r"^(trainer\.max_steps=)(\d+)$", lambda m: m[1] + str(max(4, int(m[2]) // 25)), a) for a in arguments
    ]
    corpus = [] if any(a.startswith("data=") for a in arguments) else ["data.max_bytes=200000"]
    given = {a.partition("=")[0] for a in scaled}
    return [*scaled, *(a for a in [*SMALL_MODEL, *SMALL_RUN, *corpus] if a.partition("=")[0] not in given)]


def _run(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    GlobalHydra.instance().clear()
    status: object = None
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        status = stop.code
    assert not status, f"{script} {shlex.join(arguments)} ended with status {status}"


def _check_only(script: str, arguments: list[str]) -> None:
    from hydra import compose, initialize_config_dir

    from samu_lm.training.run import check

    assert script == "train.py"
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        check(compose("train", arguments))


def _corpus(folder: Path) -> None:
    """A folder ``corpus`` with what the pages' data commands read."""
    folder.mkdir()
    texts = [f"document {n}: " + "the quick brown fox " * (n + 5) for n in range(40)]
    (folder / "part.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _corpus(tmp_path / "corpus")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in _commands(page):
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            assert set(words[1:]) <= targets, command
        elif words[0] == "source":
            assert words[1:] == [".venv/bin/activate"], command
        elif words[:2] == ["python", "train.py"]:
            if any(word in GPU_ONLY for word in words):
                _check_only(words[1], words[2:])
            else:
                _run("train.py", _training_arguments(words[2:]), monkeypatch)
        elif words[:2] == ["python", "eval.py"]:
            _run("eval.py", [*words[2:], "device=cpu"], monkeypatch)
        elif words[0] == "samu-lm" or words[:3] == ["python", "-m", "samu_lm"]:
            assert cli(words[1:] if words[0] == "samu-lm" else words[3:]) == 0, command
        else:
            pytest.fail(f"{page.name}: no rule for the command {command!r}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_runs(page: Path) -> None:
    for block in _blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
