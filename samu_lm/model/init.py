"""Initialisation of every parameter, drawn from torch's global generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

RGLRU_MIN_RADIUS, RGLRU_MAX_RADIUS = 0.9, 0.999


def linear_(module: nn.Linear, scale: float = 1.0) -> None:
    """Weights normal with variance ``scale / fan_in``; bias, where there is one, 0."""
    nn.init.normal_(module.weight, std=math.sqrt(scale / module.in_features))
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def convolution_(weight: Tensor, bias: Tensor) -> None:
    """Depthwise taps ``[W, K]`` normal with variance 0.01 / K; bias 0."""
    nn.init.normal_(weight, std=math.sqrt(0.01 / weight.shape[1]))
    nn.init.zeros_(bias)


def _uniform(like: Tensor) -> Tensor:
    """Uniform draws in (0, 1), float64, kept at or above the smallest normal float32."""
    draws = torch.rand(like.shape, dtype=torch.float64, device=like.device)
    return draws.clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def samu_spectrum_(nu_log: Tensor, theta_log: Tensor) -> None:
    """Squared radius uniform in (0, 1), angle uniform in (0, 2 pi)."""
    nu_log.copy_((-_uniform(nu_log).log() / 2).clamp(min=torch.finfo(torch.float32).tiny).log())
    theta_log.copy_((2 * math.pi * _uniform(theta_log)).log())


@torch.no_grad()
def rglru_decay_(a_param: Tensor) -> None:
    """Squared radius at r = 1 and scale 1 uniform in (0.9^2, 0.999^2)."""
    low, high = RGLRU_MIN_RADIUS**2, RGLRU_MAX_RADIUS**2
    squared = low + (high - low) * torch.rand(a_param.shape, dtype=torch.float64, device=a_param.device)
    a_param.copy_(torch.expm1(-squared.log() / 2).log())


@torch.no_grad()
def delta_decay_(rate_log: Tensor, step_bias: Tensor) -> None:
    """Rates uniform in (0, 16) and steps log-uniform in (0.001, 0.1), as Mamba-2 and Gated DeltaNet draw them.

    A head's log_alpha is ``-exp(rate_log) * softplus(step_bias + ...)``.
    """
    rate_log.copy_((16 * _uniform(rate_log)).log())
    step = torch.exp(math.log(1e-3) + (math.log(0.1) - math.log(1e-3)) * _uniform(step_bias))
    step_bias.copy_(torch.expm1(step).log())
