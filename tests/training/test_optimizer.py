from __future__ import annotations

from typing import Any

import pytest
import torch

from samu_lm.errors import ConfigError
from samu_lm.model import RecurrentLM
from samu_lm.training.optimizer import AdamW


@pytest.mark.parametrize("mixer", ["samu", "rglru", "gated_delta"])
def test_weight_decay_reaches_matrices_only(mixer: str) -> None:
    """One step with zero gradients and decay 0.1: norms, biases, radii, spectrum and controls keep every bit."""
    torch.manual_seed(0)
    model = RecurrentLM(64, width=16, rnn_width=16, depth=2, mixer=mixer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    AdamW(lr=0.5, weight_decay=0.1).build(model).step()
    decayed = model.decay_parameter_names()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.1) if name in decayed else before[name]
        assert torch.equal(parameter.detach(), expected) or name in decayed, name
        torch.testing.assert_close(parameter.detach(), expected, msg=name)
    untouched = " ".join(before.keys() - decayed)
    own = {"samu": ("nu_log", "theta_log"), "rglru": ("a_param",), "gated_delta": ("rate_log", "step_bias")}
    for part in ("norm", "bias", "conv", *own[mixer]):
        assert part in untouched
    assert all(before[name].dim() >= 2 for name in decayed)


def test_is_fused() -> None:
    optimizer = AdamW(lr=0.1).build(RecurrentLM(64, width=16, rnn_width=16, depth=1))
    assert all(group["fused"] for group in optimizer.param_groups)


def test_applies_to_a_loaded_optimizer() -> None:
    model = RecurrentLM(64, width=16, rnn_width=16, depth=1)
    optimizer = AdamW(lr=0.1, weight_decay=0.0).build(model)
    optimizer.load_state_dict(AdamW(lr=0.3, betas=(0.5, 0.5), weight_decay=0.2).build(model).state_dict())
    AdamW(lr=0.1, weight_decay=0.01).apply_to(optimizer)
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.1, (0.9, 0.95), 0.01),
        (0.1, (0.9, 0.95), 0.0),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, r"^optimizer\.lr=0: must be a positive number"),
        ({"lr": float("nan")}, r"^optimizer\.lr=nan: must be"),
        ({"lr": float("inf")}, r"^optimizer\.lr=inf: must be"),
        ({"lr": 1, "betas": (0.9, 1.0)}, r"^optimizer\.betas=\[0\.9, 1\.0\]: must be two numbers"),
        ({"lr": 1, "betas": (0.9,)}, r"^optimizer\.betas=\[0\.9\]: must be two numbers"),
        ({"lr": 1, "eps": 0.0}, r"^optimizer\.eps=0\.0: must be positive"),
        ({"lr": 1, "weight_decay": -0.1}, r"^optimizer\.weight_decay=-0\.1: must not be negative"),
    ],
)
def test_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW(**settings)
