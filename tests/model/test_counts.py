"""Parameter, FLOP and state counts: the figures of their definition, and the methods against the built module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from samu_lm.config import config_dir
from samu_lm.model import RGLRU, SAMU, GatedDelta, RecurrentBlock, RecurrentLM

ROOT = Path(__file__).resolve().parents[2]
MIXERS = ("samu", "rglru", "gated_delta")
PRESETS = sorted(path.stem for path in (config_dir() / "model").glob("*.yaml"))


def _preset(name: str) -> dict[str, Any]:
    config = yaml.safe_load((config_dir() / "model" / f"{name}.yaml").read_text())
    assert config.pop("_target_") == "samu_lm.model.RecurrentLM"
    config["vocab_size"] = config["vocab_size"] or 258
    return config


@pytest.mark.parametrize(
    ("width", "rnn_width", "mixer", "parameters"),
    [
        (2048, 2048, "rglru", 50_896_896),
        (2048, 2048, "samu", 50_372_612),
        (2560, 2560, "rglru", 79_513_600),
        (2560, 2560, "samu", 78_694_404),
        (1536, 2048, "rglru", 31_230_976),
        (1536, 2048, "samu", 30_706_692),
    ],
)
def test_block_parameters(width: int, rnn_width: int, mixer: str, parameters: int) -> None:
    with torch.device("meta"):
        block = RecurrentBlock(width, rnn_width, mixer)
    assert sum(p.numel() for p in block.parameters()) == parameters


@pytest.mark.parametrize(
    ("width", "samu", "rglru"), [(1024, 3076, 134_144), (2048, 6148, 530_432), (2560, 7684, 826_880)]
)
def test_mixer_parameters(width: int, samu: int, rglru: int) -> None:
    with torch.device("meta"):
        mixers = SAMU(width), RGLRU(width)
    assert [sum(p.numel() for p in m.parameters()) for m in mixers] == [samu, rglru]


def test_presets_are_the_named_sizes() -> None:
    names = {mixer: {"tiny", "100m", "400m"} | ({"1b"} if mixer != "gated_delta" else set()) for mixer in MIXERS}
    assert set(PRESETS) == {f"{mixer}_{size}" for mixer in MIXERS for size in names[mixer]}
    sizes = {"100m": (768, 1024, 12), "400m": (1536, 2048, 12), "1b": (2048, 2560, 24)}
    for name in PRESETS:
        config = _preset(name)
        mixer, size = name.rsplit("_", 1)
        assert config["mixer"] == mixer
        if size in sizes:
            width, rnn_width, depth = sizes[size]
            assert (config["width"], config["depth"]) == (width, depth)
            assert mixer == "gated_delta" or config["rnn_width"] == rnn_width
            assert config["vocab_size"] == 32_000


@pytest.mark.parametrize("size", ["tiny", "100m", "400m"])
@pytest.mark.parametrize("non_embedding", [False, True])
def test_gated_delta_presets_are_of_the_size_of_the_rglru_ones(size: str, non_embedding: bool) -> None:
    with torch.device("meta"):
        ours, theirs = (RecurrentLM(**_preset(f"{mixer}_{size}")) for mixer in ("gated_delta", "rglru"))
    assert abs(ours.num_parameters(non_embedding) / theirs.num_parameters(non_embedding) - 1) < 0.02


def test_gated_delta_parameters() -> None:
    """By hand: five maps of D x W, controls, taps and their bias, two numbers a head, the norm's scale."""
    with torch.device("meta"):
        mixer = GatedDelta(1536, 1280, 10)
    count = 5 * 1536 * 1280 + 2 * 10 * 1536 + 5 * 3 * 1280 + 2 * 10 + 128
    assert sum(p.numel() for p in mixer.parameters()) == count


def measure_presets() -> dict[str, dict[str, int]]:
    """For each preset: parameters by a formula of the sizes, FLOPs by counting the matrix products that really run."""
    measured = {}
    for name in PRESETS:
        config = _preset(name)
        with torch.device("meta"):
            model = RecurrentLM(**config)
            sizes = (config["width"], config["rnn_width"], config["mixer"], config["depth"])
            block = RecurrentBlock(*sizes, num_heads=config.get("num_heads", 8))
            ids = torch.zeros(1, 8, dtype=torch.int64)
        with FlopCounterMode(display=False) as forward:
            logits = model(ids)
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
        measured[name] = {
            "blocks": config["depth"] * sum(p.numel() for p in block.parameters()) + config["width"],
            "embedding": -(-config["vocab_size"] // 64) * 64 * config["width"],
            "forward": forward.get_total_flops(),
            "backward": backward.get_total_flops(),
        }
    return measured


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """From a process of its own: what other tests compile changes how torch checks meta tensors."""
    code = "import json; from tests.model.test_counts import measure_presets; print(json.dumps(measure_presets()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PRESETS)
def test_methods_against_the_built_module(name: str, measured: dict[str, dict[str, int]]) -> None:
    with torch.device("meta"):
        model = RecurrentLM(**_preset(name))
    built = measured[name]
    assert model.num_parameters(non_embedding=True) == built["blocks"]
    assert model.num_parameters() == built["blocks"] + built["embedding"]
    assert built["forward"] == 8 * model.flops_per_token(training=False)
    assert built["backward"] == 8 * (model.flops_per_token() - model.flops_per_token(training=False))


@pytest.mark.parametrize("mixer", MIXERS)
def test_state_bytes(mixer: str) -> None:
    model = RecurrentLM(258, 32, 64, 3, mixer)
    state = model.init_state(5)
    held = sum(t.numel() * t.element_size() for t in (*state.conv, *state.recurrent))
    assert held == model.state_bytes(5, activation_bytes=4)
    block = 8 * 8 * 8 * 4 + 3 * 192 * 2 if mixer == "gated_delta" else 64 * (4 + 3 * 2)
    assert model.state_bytes(1, activation_bytes=2) == 3 * block


@pytest.mark.parametrize("mixer", MIXERS)
def test_decay_reaches_matrices_alone(mixer: str) -> None:
    model = RecurrentLM(258, 32, 64, 2, mixer)
    decayed = model.decay_parameter_names()
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        spared = (
            last in {"bias", "scale", "a_param", "nu_log", "theta_log"}
            or last in {"rate_log", "step_bias"}
            or "_direction" in name
        )
        spared = spared or "_amplitude" in name or ".conv." in name
        assert (name in decayed) != spared, name
        assert name not in decayed or parameter.dim() >= 2
