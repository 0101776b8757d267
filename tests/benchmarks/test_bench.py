"""``samu-lm bench``: every kind is found, says what it does, and is imported only when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from samu_lm.benchmarks.bench import BENCHES
from samu_lm.cli import main


@pytest.mark.parametrize("kind", sorted(BENCHES))
def test_help_with_an_example(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", kind, "--help"])
    assert stop.value.code == 0
    assert f"example: samu-lm bench {kind}" in capsys.readouterr().out


def test_other_kinds_are_not_imported() -> None:
    code = """if True:
        import sys
        from samu_lm.cli import main
        try:
            main(["bench", "mixer", "--help"])
        finally:
            others = {f"samu_lm.benchmarks.{name}" for name in ("block", "step", "delta")} & set(sys.modules)
            assert not others, others
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("arguments", "said"), [([], "WHAT"), (["nope"], "'nope'"), (["mixer", "--nope"], "--nope")])
def test_odd_kinds(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
