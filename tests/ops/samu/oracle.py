"""SAMU as a float64 loop over tokens, written from its definition alone: what every implementation is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def samu_loop(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y ``[B, L, W]`` and final state ``[B, W]``, float64; differentiable by autograd."""
    x, eta, delta, nu_log, theta_log = (t.double() for t in (x, eta, delta, nu_log, theta_log))
    length, modes = x.shape[1], x.shape[2] // 2
    nu, theta = nu_log.exp(), theta_log.exp()
    gamma = torch.sqrt(-torch.expm1(-2 * nu)) + 1e-8
    h = None
    if initial_state is not None:
        h = torch.complex(initial_state[:, :modes].double(), initial_state[:, modes:].double())
    outputs = []
    for t in range(length):
        u = gamma * torch.complex(x[:, t, :modes], x[:, t, modes:])
        if h is None:
            h = u
        else:
            radius = torch.exp(-nu * torch.exp(eta[:, t, None]))
            moved = torch.polar(radius, (theta + delta[:, t, None]).expand_as(radius)) * h + u
            h = moved if reset is None else torch.where(reset[:, t, None], u, moved)
        outputs.append(torch.cat([h.real, h.imag], -1).relu())
    assert h is not None
    return torch.stack(outputs, 1), torch.cat([h.real, h.imag], -1)


def controls(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> tuple[Tensor, Tensor]:
    """eta and delta ``[B, L]``, float64."""
    x, phase, radial = x.double(), phase_direction.double(), radial_direction.double()
    extended = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    p = torch.tanh((extended * (phase / phase.norm())).sum(-1))
    s = torch.tanh((extended * (radial / radial.norm())).sum(-1))
    scale = (x.shape[-1] / 2) ** -0.5
    return (
        scale * torch.tanh(radial_amplitude.double()) * s / (1 + s**2),
        scale * torch.tanh(phase_amplitude.double()) * p,
    )
