"""The house rules as tests: lint, format, types, sizes, layout, and dependencies that point one way."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import samu_lm

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {
    ".ci", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "benchmarks",
    "configs", "constraints", "docker", "docs", "eval.py", "pyproject.toml", "samu_lm", "tests", "train.py",
}  # fmt: skip


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def _sources() -> list[Path]:
    return [ROOT / name for name in _tracked() if name.endswith(".py")]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["lint", "format", "types"],
)
def test_tool_is_content(command: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_module_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages(samu_lm.__path__, "samu_lm.")]
    assert len(names) > 30
    for name in names:
        if name != "samu_lm.__main__":  # runs the command line
            importlib.import_module(name)


def test_top_level_holds_what_it_should() -> None:
    assert {name.split("/")[0] for name in _tracked()} == TOP_LEVEL
    assert {Path(n).parts[1] for n in _tracked() if n.startswith("benchmarks/")} == {"results"}


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in _sources():
        text = path.read_text()
        lines = text.count("\n")
        if lines > 400:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        if path.name.startswith("kernel"):
            continue  # splitting a kernel may hide the algorithm
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 80:
                    long.append(f"{path.relative_to(ROOT)}:{node.name}: {length} lines")
    assert not long, "\n".join(long)


# Each package may import those listed, from samu_lm.
ALLOWED = {
    "ops": {"ops", "errors"},
    "model": {"model", "ops", "errors"},
    "data": {"data", "errors"},
    "training": {"training", "ops", "model", "data", "config", "errors", "entry", "checkpoint", "environment"},
    "evaluation": {"evaluation", "model", "data", "config", "errors", "entry", "checkpoint", "environment"},
    "benchmarks": {"benchmarks", "ops", "model", "training", "data", "errors", "environment"},
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("samu_lm.")}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_dependencies_point_one_way(package: str) -> None:
    for path in (ROOT / "samu_lm" / package).rglob("*.py"):
        for name in _imports(path):
            assert name.split(".")[1] in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"


def test_backends_are_reached_through_the_op_alone() -> None:
    """Outside its own folder, an op's __init__ is the only thing imported."""
    for path in (ROOT / "samu_lm").rglob("*.py"):
        folder = path.parent.name
        for name in _imports(path):
            inner = re.fullmatch(r"samu_lm\.ops\.(samu|rglru|causal_conv1d|gated_delta|decode)\.(.+)", name)
            assert inner is None or folder in (inner[1], "benchmarks"), f"{path.relative_to(ROOT)} imports {name}"


def test_docstrings_of_public_calls() -> None:
    """Every public function and class of the package says what it does."""
    missing = []
    for path in (ROOT / "samu_lm").rglob("*.py"):
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree) and path.read_text().strip():
            missing.append(f"{path.relative_to(ROOT)}: module")
        if path.name.endswith("_probe.py"):
            continue  # a script: its page says what it does
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                continue  # a kernel is reached through its launcher alone
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not missing, "\n".join(missing)


def test_nothing_of_one_machine_is_tracked() -> None:
    """No absolute path of a checkout or home folder, no download address in a lock file."""
    home = str(Path.home())
    for name in _tracked():
        text = (ROOT / name).read_bytes()
        assert str(ROOT).encode() + b"/" not in text, name
        assert len(home) < 3 or (home + "/").encode() not in text, name
    assert not [name for name in _tracked() if name.endswith((".lock", "poetry.lock", "uv.lock"))]
