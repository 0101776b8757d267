"""Initialisation, by its statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from samu_lm.model import RGLRU, SAMU, GatedDelta, RecurrentLM


def _is_uniform(values: torch.Tensor, low: float, high: float) -> None:
    """Kolmogorov-Smirnov distance within the 1e-4 quantile, and no value outside."""
    values = values.detach().double().sort().values
    assert low <= values[0]
    assert values[-1] <= high
    expected = (torch.arange(len(values), dtype=torch.float64) + 0.5) / len(values)
    distance = ((values - low) / (high - low) - expected).abs().max()
    assert distance < 2.2 / math.sqrt(len(values))


def test_samu_spectrum() -> None:
    mixer = SAMU(20_000)
    _is_uniform(torch.exp(-2 * mixer.nu_log.double().exp()), 0, 1)
    _is_uniform(mixer.theta_log.double().exp(), 0, 2 * math.pi + 1e-6)
    assert abs(mixer.phase_direction.std() - 1) < 0.02
    assert abs(mixer.radial_direction.std() - 1) < 0.02
    assert mixer.phase_amplitude == 0
    assert mixer.radial_amplitude == 0


def test_samu_spectrum_at_the_ends_of_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for draw in (0.0, 1 - 2**-53):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda shape, draw=draw, **kw: torch.full(shape, draw, **kw))
            mixer = SAMU(8)
        assert torch.isfinite(mixer.nu_log).all()
        assert torch.isfinite(mixer.theta_log).all()


def test_rglru_radii() -> None:
    mixer = RGLRU(16_000)
    radius = torch.exp(-nn.functional.softplus(mixer.a_param.double()))
    _is_uniform(radius**2, 0.9**2 - 1e-6, 0.999**2 + 1e-6)
    assert abs(mixer.a_gate.weight.std() / (1000**-0.5) - 1) < 0.01
    assert not mixer.a_gate.bias.any()
    assert not mixer.input_gate.bias.any()


def test_gated_delta_decays() -> None:
    mixer = GatedDelta(4, 20_000, 20_000)
    _is_uniform(mixer.rate_log.double().exp(), 0, 16 + 1e-5)
    step = nn.functional.softplus(mixer.step_bias.double())
    _is_uniform(step.log(), math.log(1e-3) - 1e-6, math.log(0.1) + 1e-6)


@pytest.mark.parametrize("mixer", ["samu", "rglru", "gated_delta"])
def test_linears(mixer: str) -> None:
    depth, width, rnn_width = 3, 128, 256
    model = RecurrentLM(1000, width, rnn_width, depth, mixer)
    assert abs(model.embedding.weight.std() * math.sqrt(width) - 1) < 0.03
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            scaled = name.endswith(("linear_out", "mlp.down"))
            std = math.sqrt((2 / depth if scaled else 1) / module.in_features)
            assert abs(module.weight.std() / std - 1) < 0.03, name
            assert module.bias is None or not module.bias.any()
        if name.endswith(".conv"):
            std = math.sqrt(0.25 / 3 if mixer == "gated_delta" else 0.01 / 4)
            assert abs(module.weight.std() / std - 1) < 0.1
            assert not module.bias.any()
        if name.endswith("norm"):
            assert not module.scale.any()


def test_seed_decides_everything() -> None:
    models = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        models.append(RecurrentLM(64, 16, 32, 2, "rglru").state_dict())
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])
    assert not torch.equal(models[0]["embedding.weight"], models[2]["embedding.weight"])
