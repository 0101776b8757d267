"""The console script: quick help, commands that print what they promise, errors as one line with status 2."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from samu_lm import cli
from samu_lm.cli import COMMANDS, main
from samu_lm.errors import ConfigError
from samu_lm.model import RecurrentLM

ROOT = Path(__file__).resolve().parents[1]


def printed_error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = """if True:
        import sys
        from samu_lm.cli import main
        try:
            main(["--help"])
        finally:
            heavy = {"torch", "hydra", "lightning", "numpy", "matplotlib"} & set(sys.modules)
            assert not heavy, heavy
    """
    before = _seconds_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert _seconds_of_children() - before < 1.0
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n    {name}" in done.stdout


def _seconds_of_children() -> float:
    """Processor time, which other programs on the machine do not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: samu-lm {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["presests"], "presests"),
        (["presets", "--jsn"], "--jsn"),
        (["presets", "--vocab-size", "x"], "x"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    message = printed_error(capsys)
    assert named in message
    assert "--help" in message


def test_a_commands_own_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise ConfigError("data.path", "nowhere", "no such folder")

    module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(COMMANDS, "broken", cli.Command("broken_module", "breaks"))
    monkeypatch.setitem(sys.modules, "broken_module", module)
    assert main(["broken"]) == 2
    assert printed_error(capsys) == "samu-lm broken: data.path=nowhere: no such folder\n"


def test_a_commands_status_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--status", type=int), run=lambda a: a.status
    )
    monkeypatch.setitem(COMMANDS, "status", cli.Command("status_module", "ends with a status"))
    monkeypatch.setitem(sys.modules, "status_module", module)
    assert main(["status", "--status", "3"]) == 3


def test_presets_lists_every_preset_with_the_built_modules_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")}
    parameters = [row["parameters"] for row in rows.values()]
    assert parameters == sorted(parameters)
    for name in ("samu_tiny", "rglru_tiny"):
        config = dict(OmegaConf.load(ROOT / "configs" / "model" / f"{name}.yaml"))
        del config["_target_"]
        model = RecurrentLM(**config | {"vocab_size": 258})
        row = rows[name]
        assert row["parameters"] == sum(p.numel() for p in model.parameters())
        assert row["non_embedding_parameters"] == row["parameters"] - model.embedding.weight.numel()
        assert row["training_flops_per_token"] == 3 * row["forward_flops_per_token"] == model.flops_per_token()
        assert row["state_bytes"] == model.state_bytes()
    # By hand: 12 blocks of the sizes the specification states, a 32,000-word embedding of 1536, the final norm.
    assert rows["samu_400m"]["parameters"] == 12 * 30_706_692 + 32_000 * 1536 + 1536
    assert rows["rglru_400m"]["parameters"] == 12 * 31_230_976 + 32_000 * 1536 + 1536


def test_presets_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "samu_400m", "samu_tiny", "--vocab-size", "512"]) == 0
    header, units, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "preset",
        "vocabulary",
        "parameters",
        "non-embedding",
        "forward",
        "training",
        "state",
        "bytes",
    ]
    assert "FLOPs/token" in units
    assert [line.split()[:2] for line in lines] == [["samu_tiny", "512"], ["samu_400m", "32,000"]]
    assert lines[1].split()[2] == f"{12 * 30_706_692 + 32_000 * 1536 + 1536:,}"
    assert len({len(line) for line in lines}) == 1


def test_presets_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "samu_tiy"]) == 2
    assert "did you mean samu_tiny?" in printed_error(capsys)
    assert main(["presets", "--vocab-size", "0"]) == 2
    assert "--vocab-size=0: must be 1 or more" in printed_error(capsys)


def test_module_entry_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "samu_lm", "--version"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("samu-lm ")
