"""SAMU in plain PyTorch: the definition that the kernels are held to.

Shapes: x, y ``[B, L, W]``, W = 2M, read as M complex numbers (real parts first); eta, delta ``[B, L]`` float32;
nu_log, theta_log ``[M]``; state ``[B, W]`` float32; first bool ``[B, L]``.

The forward op also returns its states as complex64 ``[B, L, M]``, kept for the backward pass.
"""

from contextlib import nullcontext
from typing import Optional

import torch
from torch import Tensor

from samu_lm.ops.resets import dense_first_token_mask
from samu_lm.ops.scan import adjoint_scan, linear_scan, previous_states

# exp(80) is near the top of float32, and a decay of 1e30 or a log radius below -1e30 forgets everything at once. The
# bounds keep 0 * infinity out of the gradients.
_MAX_ETA = 80.0
_MAX_NU = 1e30
_MIN_LOG_RADIUS = -1e30


def spectrum(nu_log: Tensor, theta_log: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """nu, theta, gamma and d gamma / d nu_log, all float64 ``[M]``.

    A mode remembers up to thousands of tokens, and an error of its angle or decay grows with every one of them: these
    M values are therefore worked out in float64 and rounded once.
    """
    nu = nu_log.double().exp().clamp(1e-300, _MAX_NU)
    theta = theta_log.double().exp()
    root = (-torch.expm1(-2 * nu)).sqrt()
    return nu, theta, root + 1e-8, nu * torch.exp(-2 * nu) / root


def _as_complex(x: Tensor, scale: Tensor | None = None) -> Tensor:
    modes = x.shape[-1] // 2
    x = x.float()
    real, imag = x[..., :modes], x[..., modes:]
    return torch.complex(real, imag) if scale is None else torch.complex(real * scale, imag * scale)


def _sum_tokens(t: Tensor) -> Tensor:
    return t.sum((0, 1), dtype=torch.float64)


def _as_real(h: Tensor) -> Tensor:
    return torch.cat([h.real, h.imag], dim=-1)


def _transitions(eta: Tensor, delta: Tensor, nu: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transitions complex64 ``[B, L, M]``, their log radius float32 ``[B, L, M]``, exp(eta) ``[B, L]``."""
    stretch = eta.float().clamp(max=_MAX_ETA).exp()
    log_radius = (stretch[..., None] * -nu.float()).clamp(min=_MIN_LOG_RADIUS)
    theta_turn = torch.complex(theta.cos().float(), theta.sin().float())
    delta_turn = torch.complex(delta.float().cos(), delta.float().sin())
    turn = delta_turn[..., None] * theta_turn
    torch.view_as_real(turn).mul_(log_radius.exp()[..., None])  # a complex product with a real tensor would copy it
    return turn, log_radius, stretch


@torch.library.custom_op("samu_lm::samu_reference", mutates_args=())
def _forward(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    first: Optional[Tensor],  # noqa: UP045 (the schema is inferred from this annotation)
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _ = x.shape
    mask = dense_first_token_mask(first, batch, length, x.device, fresh=initial_state is None)
    nu, theta, gamma, _ = spectrum(nu_log, theta_log)
    a, _, _ = _transitions(eta, delta, nu, theta)
    u = _as_complex(x, gamma.float())
    state = None if initial_state is None else _as_complex(initial_state)
    h = linear_scan(a, u, mask, state)
    return _as_real(h).relu_().to(x.dtype), _as_real(h[:, -1]), h


@_forward.register_fake
def _(x, eta, delta, nu_log, theta_log, first, initial_state):
    batch, length, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    state = x.new_empty(batch, width, dtype=torch.float32)
    return y, state, x.new_empty(batch, length, width // 2, dtype=torch.complex64)


@torch.library.custom_op("samu_lm::samu_reference_backward", mutates_args=())
def _backward(
    grad_y: Tensor,
    grad_final_state: Tensor,
    h: Tensor,
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    first: Optional[Tensor],  # noqa: UP045
    initial_state: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, _ = x.shape
    mask = dense_first_token_mask(first, batch, length, x.device, fresh=initial_state is None)
    nu, theta, gamma, dgamma = spectrum(nu_log, theta_log)
    a, log_radius, stretch = _transitions(eta, delta, nu, theta)
    grad_h = _as_complex(grad_y)
    torch.view_as_real(grad_h).masked_fill_(torch.view_as_real(h) <= 0, 0)
    g = adjoint_scan(a, grad_h, mask, _as_complex(grad_final_state))
    state = None if initial_state is None else _as_complex(initial_state)
    # d loss / d log a_t: its real part belongs to the log radius, its imaginary part to the angle.
    grad_log_a = g * (a * previous_states(h, mask, state)).conj_physical_()
    grad_log_radius, grad_angle = grad_log_a.real, grad_log_a.imag
    grad_gamma = _sum_tokens(torch.view_as_real(g * _as_complex(x).conj())[..., 0])
    grad_nu_log = grad_gamma * dgamma - nu * _sum_tokens(grad_log_radius * stretch[..., None])
    grad_theta_log = theta * _sum_tokens(grad_angle)
    grad_state = (g[:, 0] * a[:, 0].conj()).masked_fill(mask[:, :1], 0)
    return (
        (_as_real(g) * torch.cat([gamma, gamma]).float()).to(x.dtype),
        (grad_log_radius * log_radius).sum(-1),
        grad_angle.sum(-1),
        grad_nu_log.to(nu_log.dtype),
        grad_theta_log.to(theta_log.dtype),
        _as_real(grad_state),
    )


@_backward.register_fake
def _(grad_y, grad_final_state, h, x, eta, delta, nu_log, theta_log, first, initial_state):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        eta.new_empty(eta.shape, dtype=torch.float32),
        delta.new_empty(delta.shape, dtype=torch.float32),
        torch.empty_like(nu_log),
        torch.empty_like(theta_log),
        torch.empty_like(grad_final_state),
    )


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[2])
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, grad_y, grad_final_state, _grad_h):
    *inputs, h = ctx.saved_tensors
    eta, delta, initial_state = inputs[1], inputs[2], inputs[6]
    grads = _backward(grad_y, grad_final_state, h, *inputs)
    return (
        grads[0],
        grads[1].to(eta.dtype),
        grads[2].to(delta.dtype),
        grads[3],
        grads[4],
        None,
        None if initial_state is None else grads[5].to(initial_state.dtype),
    )


_forward.register_autograd(_differentiate, setup_context=_save)


def samu_scan(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence and its rectified output; see :func:`samu_lm.ops.samu`. Returns y and the final state."""
    y, final_state, _ = _forward(x, eta, delta, nu_log, theta_log, first, initial_state)
    return y, final_state


def samu_controls(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> tuple[Tensor, Tensor]:
    """The two controls per token in float32, whatever autocast says; see :func:`samu_lm.ops.samu_controls`."""
    width = x.shape[-1]
    device = x.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        directions = torch.stack([phase_direction, radial_direction]).float()
        directions = torch.nn.functional.normalize(directions, dim=-1)
        # Matrix-vector products: unlike a matrix product, they stay float32 where TF32 is switched on.
        x = x.float()
        p = torch.tanh(x @ directions[0, :width] + directions[0, width])
        s = torch.tanh(x @ directions[1, :width] + directions[1, width])
        scale = (width // 2) ** -0.5
        delta = scale * torch.tanh(phase_amplitude.float()) * p
        eta = scale * torch.tanh(radial_amplitude.float()) * (s / (1 + s * s))
    return eta, delta
