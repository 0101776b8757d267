"""The SAMU mixer in float64 from the equations of its definition, whole sequences at once: what times are gated by.

Shapes: x ``[B, L, 2M]``; parameters as in ``samu_lm.ops.samu_mixer``. Runs wherever torch does; at (1, 131072, 1024) it
takes some 20 GiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("x", "nu_log", "theta_log", "phase_direction", "radial_direction", "phase_amplitude", "radial_amplitude")


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth, in float64; near a truth of 0 lies only 0."""
    truth = truth.double()
    return float((value.detach().double() - truth).norm() / truth.norm().clamp(min=1e-30))


def scan64(a: Tensor, u: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + u_t along dimension 1, by doubling the distance; a is 0 where nothing comes before."""
    distance = 1
    while distance < a.shape[1]:
        u = torch.cat([u[:, :distance], u[:, distance:] + a[:, distance:] * u[:, :-distance]], 1)
        a = torch.cat([a[:, :distance], a[:, distance:] * a[:, :-distance]], 1)
        distance *= 2
    return u


def _controls(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, phase, radial, phase_amplitude, radial_amplitude = inputs
    width = x.shape[-1]
    phase, radial = phase / phase.norm(), radial / radial.norm()
    p = torch.tanh(x @ phase[:width] + phase[width])
    s = torch.tanh(x @ radial[:width] + radial[width])
    scale = (width / 2) ** -0.5
    return scale * torch.tanh(radial_amplitude) * s / (1 + s**2), scale * torch.tanh(phase_amplitude) * p


def _shifted(t: Tensor) -> Tensor:
    """t at the token before; 0 at token 0."""
    return torch.cat([torch.zeros_like(t[:, :1]), t[:, :-1]], 1)


def mixer64(
    inputs: dict[str, Tensor], first: Tensor, grad_y: Tensor, through: Tensor | None = None
) -> dict[str, Tensor]:
    """y and the gradient of ``(y * grad_y).sum()`` in every input of :data:`NAMES`.

    Args:
        inputs: the mixer's inputs by name, any floating dtype.
        first: bool ``[B, L]``, True at every document's first token, token 0 included.
        grad_y: ``[B, L, 2M]``.
        through: bool ``[B, L, 2M]``, the outputs that the rectifier lets through; worked out here if not given.
    """
    wide = {name: inputs[name].detach().double() for name in NAMES}
    leaves = [wide[n].requires_grad_() for n in ("x", *NAMES[3:])]
    eta, delta = _controls(leaves)
    x, nu, theta = wide["x"].detach(), wide["nu_log"].exp(), wide["theta_log"].exp()
    modes = nu.numel()
    root = torch.sqrt(-torch.expm1(-2 * nu))
    gamma, stretch = root + 1e-8, eta.detach().exp()[..., None]
    a = torch.polar((-nu * stretch).exp(), theta + delta.detach()[..., None]).masked_fill(first[..., None], 0)
    z = torch.complex(x[..., :modes], x[..., modes:])
    h = scan64(a, gamma * z)
    if through is None:
        through = torch.cat([h.real, h.imag], -1) > 0
    direct = grad_y.double() * through
    d = torch.complex(direct[..., :modes], direct[..., modes:])
    # The adjoint is the same scan backwards: token t receives through the conjugate of a_{t+1}.
    g = scan64(_shifted(a.flip(1)).conj().resolve_conj(), d.flip(1)).flip(1)
    carried = g * (a * _shifted(h)).conj().resolve_conj()
    del a
    by_radius, by_angle = carried.real, carried.imag
    grad_gamma = (g * z.conj()).real.sum((0, 1))
    grad_nu = -(by_radius * stretch).sum((0, 1)) + grad_gamma * torch.exp(-2 * nu) / root
    grad_eta, grad_delta = -(by_radius * nu * stretch).sum(-1), by_angle.sum(-1)
    grads = torch.autograd.grad((eta, delta), leaves, (grad_eta, grad_delta))
    direct = g * gamma
    return {
        "y": torch.cat([h.real, h.imag], -1).relu(),
        "x": grads[0] + torch.cat([direct.real, direct.imag], -1),
        "nu_log": nu * grad_nu,
        "theta_log": theta * by_angle.sum((0, 1)),
        **dict(zip(NAMES[3:], grads[1:], strict=True)),
    }


def draw_mixer(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, document: int = 1024, amplitude: float = 0.5
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs as at initialisation (but for the amplitudes, 0 there), first tokens of documents, an incoming gradient.

    Args:
        document: mean length of a document, in tokens; 0 for one document per row.
    """
    batch, length, width = shape
    modes = width // 2
    gen = torch.Generator(device).manual_seed(0)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=gen, device=device).clamp(min=torch.finfo(torch.float32).tiny)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device)

    inputs = {
        "x": normal(*shape).to(dtype),
        "nu_log": torch.log(-torch.log(uniform(modes).clamp(max=1 - 1e-7)) / 2),
        "theta_log": torch.log(2 * torch.pi * uniform(modes)),
        "phase_direction": normal(width + 1),
        "radial_direction": normal(width + 1),
        "phase_amplitude": torch.tensor(amplitude, device=device),
        "radial_amplitude": torch.tensor(-amplitude, device=device),
    }
    first = torch.zeros(batch, length, dtype=torch.bool, device=device)
    if document:
        first = torch.rand(batch, length, generator=gen, device=device) < 1 / document
    first[:, 0] = True
    return inputs, first, normal(*shape).to(dtype)
