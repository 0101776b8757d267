"""The container files agree with the project: no engine is needed to see that."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) of the Dockerfile, comments dropped, continued lines joined, ARG defaults filled in."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    defaults = dict(rest.split("=", 1) for name, rest in found if name == "ARG")
    return [(name, re.sub(r"\$\{(\w+)\}", lambda m: defaults.get(m[1], m[0]), rest)) for name, rest in found]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def compose_file() -> dict[str, Any]:
    """The compose file with its variables' defaults, as without an environment."""
    text = (ROOT / "docker" / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def sources() -> list[str]:
    return [source for rest in of("COPY") for source in rest.split()[:-1]]


def test_python_satisfies_the_project() -> None:
    (version,) = [rest.split("=")[1] for rest in of("ARG") if rest.startswith("PYTHON_VERSION=")]
    assert SpecifierSet(project()["requires-python"]).contains(version)
    installed = next(rest for rest in of("RUN") if "apt-get install" in rest)
    assert {f"python{version}", f"python{version}-dev", f"python{version}-venv"} <= set(installed.split())


def test_base_has_the_cuda_runtime() -> None:
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-(cudnn-)?runtime-ubuntu24\.04", of("FROM")[0])


def test_installed_extras_exist() -> None:
    (extras,) = re.findall(r'pip install --editable "\.\[([\w,]+)\]"', " ".join(of("RUN")))
    assert set(extras.split(",")) <= set(project()["optional-dependencies"])
    assert not set(extras.split(",")) & {"dev"}


def test_copied_files_exist_and_reach_the_build() -> None:
    """Every COPY source is in the tree, and the ignore file lets it into the build context."""
    allowed = [
        line.removeprefix("!")
        for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sources()
    for source in sources():
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source
    assert sorted(allowed) == sorted(set(sources())), "the context holds what is copied and nothing else"


def test_build_has_what_the_metadata_names() -> None:
    """pip builds the package's metadata in the image: the files it names must be there by then."""
    before_install = [rest for instruction, rest in instructions()[: _install_at()] if instruction == "COPY"]
    copied = {source for rest in before_install for source in rest.split()[:-1]}
    assert {"pyproject.toml", project()["readme"], *project()["license-files"]} <= copied


def _install_at() -> int:
    return next(i for i, (name, rest) in enumerate(instructions()) if name == "RUN" and "pip install" in rest)


def test_entry_point_is_train() -> None:
    entry = yaml.safe_load(of("ENTRYPOINT")[-1])
    assert entry == ["python", "train.py"]
    assert entry[1] in sources()


def test_runs_as_a_user_that_owns_the_runs_folder() -> None:
    user = of("USER")[-1]
    assert user not in ("root", "0")
    setup = next(rest for rest in of("RUN") if "useradd" in rest)
    assert re.search(rf"useradd .*--uid (?!0 )\d+ .*\b{user}\b", setup)
    assert re.search(rf"install -d -o {user} -g {user} [^&]*/app/runs", setup)
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_services_build_from_the_dockerfile_with_a_gpu_and_mounted_folders() -> None:
    services = compose_file()["services"]
    assert set(services) == {"train", "eval"}
    for service in services.values():
        build = service["build"]
        context = (ROOT / "docker" / build["context"]).resolve()
        assert context == ROOT
        assert context / build["dockerfile"] == DOCKERFILE
        arguments = {rest.split("=")[0] for rest in of("ARG")}
        assert set(build["args"]) <= arguments
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["capabilities"] == ["gpu"]
        assert {volume["target"] for volume in service["volumes"]} == {"/app/runs", "/data"}


@pytest.mark.parametrize(("service", "script"), [("train", "train.py"), ("eval", "eval.py")])
def test_service_command_composes(service: str, script: str) -> None:
    definition = compose_file()["services"][service]
    entry = definition.get("entrypoint") or yaml.safe_load(of("ENTRYPOINT")[-1])
    assert entry == ["python", script]
    assert script in sources()
    if service == "eval":
        import samu_lm.evaluation.command_line  # noqa: F401  registers the open groups of eval.yaml
    overrides = definition["command"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose(service, overrides=overrides, return_hydra_config=True)
    run = compose_file()["services"]["train"]["command"][0].partition("=")[2]
    if service == "train":
        assert config.hydra.run.dir == run
    else:
        assert config.checkpoint == f"{run}/checkpoints/last.ckpt", "the trained run's checkpoint, by its contract name"
