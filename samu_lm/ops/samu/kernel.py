"""SAMU on the GPU: custom ops over the Triton kernels (docs/kernels.md draws the passes).

Shapes: x, y ``[B, L, W]``, W = 2M, read as M complex numbers (real parts first); eta, delta ``[B, L]`` float32;
nu_log, theta_log ``[M]``; directions ``[W + 1]``; amplitudes ``[]``; states ``[B, W]`` float32; first bool ``[B, L]``.

``first`` None means: token 0 alone without an initial state, no token at all with one. Each op is traceable without a
graph break, capturable in a CUDA graph, and gives the same bits on every run.
"""

from typing import Optional

import torch
from torch import Tensor

from samu_lm.ops.common.replay import is_plain
from samu_lm.ops.samu import kernel_passes as passes
from samu_lm.ops.samu.kernel_plan import signature

# The schemas are inferred from the annotations, which must spell Optional out.
# ruff: noqa: UP045


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _no_rows(x: Tensor) -> Tensor:
    return x.new_empty(0, x.shape[2], dtype=torch.float32)


@torch.library.custom_op("samu_lm::samu_mixer_triton", mutates_args=())
def _mixer(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    phase_direction: Tensor,
    radial_direction: Tensor,
    phase_amplitude: Tensor,
    radial_amplitude: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    save: bool,
    signature: str,
) -> tuple[Tensor, Tensor, Tensor]:
    parameters = passes.Parameters(
        nu_log, theta_log, phase_direction, radial_direction, phase_amplitude, radial_amplitude
    )
    y, final_state, kept = passes.mixer_forward(x, parameters, first, initial_state, save)
    return y, final_state, kept if save else x.new_empty(0, dtype=torch.float32)


@_mixer.register_fake
def _(x, nu_log, theta_log, phase_direction, radial_direction, phase_amplitude, radial_amplitude, first, initial, save,
    signature,
):  # fmt: skip
    return passes.fake_forward(x, save, given=False)


@torch.library.custom_op("samu_lm::samu_mixer_triton_backward", mutates_args=())
def _mixer_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    phase_direction: Tensor,
    radial_direction: Tensor,
    phase_amplitude: Tensor,
    radial_amplitude: Tensor,
    saved: Tensor,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    parameters = passes.Parameters(
        nu_log, theta_log, phase_direction, radial_direction, phase_amplitude, radial_amplitude
    )
    grads = passes.mixer_backward(grad_y, grad_final_state, x, parameters, saved, has_initial)
    return *grads[:2], _no_rows(x) if grads[2] is None else grads[2]


@_mixer_backward.register_fake
def _(grad_y, grad_final, x, nu_log, theta_log, phase, radial, phase_amplitude, radial_amplitude, saved, has_initial):
    grad_x, grad_initial = passes.fake_backward(x, has_initial)
    return grad_x, x.new_empty(3 * x.shape[2] + 4, dtype=torch.float32), grad_initial


def _save_mixer(ctx, inputs, output):
    x, *parameters, _first, initial_state, _save, _signature = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x, *parameters, output[2])
    ctx.initial_dtype = None if initial_state is None else initial_state.dtype


def _mixer_gradients(ctx, grad_y, grad_final_state, backward):
    """Gradients of x, the six parameters and the initial state."""
    x, *parameters, saved = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    has_initial = ctx.initial_dtype is not None
    grad_x, packed, grad_initial = backward(grad_y, grad_final_state, x, parameters, saved, has_initial)
    width = x.shape[2]
    parts = torch.split(packed, [width // 2, width // 2, width + 1, width + 1, 1, 1])
    grads = [_like(part, p) for part, p in zip(parts, parameters, strict=True)]
    return grad_x, *grads, grad_initial.to(ctx.initial_dtype) if has_initial else None


def _like(grad: Tensor, parameter: Tensor) -> Tensor:
    if parameter.dim() == 0:
        grad = grad[0]
    return grad if grad.dtype == parameter.dtype else grad.to(parameter.dtype)


def _differentiate_mixer(ctx, grad_y, grad_final_state, _grad_saved):
    def backward(grad_y, grad_final_state, x, parameters, saved, has_initial):
        return _mixer_backward(grad_y, grad_final_state, x, *parameters, saved, has_initial)

    *grads, grad_initial = _mixer_gradients(ctx, grad_y, grad_final_state, backward)
    return *grads, None, grad_initial, None, None


_mixer.register_autograd(_differentiate_mixer, setup_context=_save_mixer)


class _EagerMixer(torch.autograd.Function):
    """The same op for plain tensors outside any tracing: a fifth of the host time of a call through the dispatcher."""

    @staticmethod
    def forward(ctx, x, *rest):
        *parameters, first, initial_state = rest
        y, final_state, kept = passes.mixer_forward(x, passes.Parameters(*parameters), first, initial_state, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, kept)
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final_state):
        def backward(grad_y, grad_final_state, x, parameters, kept, has_initial):
            return passes.mixer_backward(grad_y, grad_final_state, x, passes.Parameters(*parameters), kept, has_initial)

        *grads, grad_initial = _mixer_gradients(ctx, grad_y, grad_final_state, backward)
        return *grads, None, grad_initial


@torch.library.custom_op("samu_lm::samu_scan_triton", mutates_args=())
def _scan(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    save: bool,
    signature: str,
) -> tuple[Tensor, Tensor, Tensor]:
    y, final_state, kept = passes.scan_forward(x, eta, delta, nu_log, theta_log, first, initial_state, save)
    return y, final_state, kept if save else x.new_empty(0, dtype=torch.float32)


@_scan.register_fake
def _(x, eta, delta, nu_log, theta_log, first, initial_state, save, signature):
    return passes.fake_forward(x, save, given=True)


@torch.library.custom_op("samu_lm::samu_scan_triton_backward", mutates_args=())
def _scan_backward(
    grad_y: Tensor,
    grad_final_state: Optional[Tensor],
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    saved: Tensor,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = passes.scan_backward(grad_y, grad_final_state, x, nu_log, theta_log, saved, has_initial)
    return *grads[:4], _no_rows(x) if grads[4] is None else grads[4]


@_scan_backward.register_fake
def _(grad_y, grad_final_state, x, nu_log, theta_log, saved, has_initial):
    batch, length, width = x.shape
    grad_x, grad_initial = passes.fake_backward(x, has_initial)
    grad_eta, grad_delta = (x.new_empty(batch, length, dtype=torch.float32) for _ in range(2))
    return grad_x, grad_eta, grad_delta, x.new_empty(width, dtype=torch.float32), grad_initial


def _save_scan(ctx, inputs, output):
    x, eta, delta, nu_log, theta_log, _first, initial_state, _save, _signature = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x, nu_log, theta_log, output[2])
    ctx.dtypes = eta.dtype, delta.dtype, None if initial_state is None else initial_state.dtype


def _differentiate_scan(ctx, grad_y, grad_final_state, _grad_saved):
    x, nu_log, theta_log, saved = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    eta_dtype, delta_dtype, initial_dtype = ctx.dtypes
    grad_x, grad_eta, grad_delta, packed, grad_initial = _scan_backward(
        grad_y, grad_final_state, x, nu_log, theta_log, saved, initial_dtype is not None
    )
    modes = x.shape[2] // 2
    return (
        grad_x,
        grad_eta.to(eta_dtype),
        grad_delta.to(delta_dtype),
        packed[:modes].to(nu_log.dtype),
        packed[modes:].to(theta_log.dtype),
        None,
        None if initial_dtype is None else grad_initial.to(initial_dtype),
        None,
        None,
    )


_scan.register_autograd(_differentiate_scan, setup_context=_save_scan)


@torch.library.custom_op("samu_lm::samu_controls_triton", mutates_args=())
def _controls(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return passes.controls_forward(x, phase_direction, radial_direction, phase_amplitude, radial_amplitude)


@_controls.register_fake
def _(x, phase_direction, radial_direction, phase_amplitude, radial_amplitude):
    return passes.fake_controls(x)


@torch.library.custom_op("samu_lm::samu_controls_triton_backward", mutates_args=())
def _controls_backward(
    grad_eta: Tensor, grad_delta: Tensor, x: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor]:
    return passes.controls_backward(grad_eta, grad_delta, x, phase_amplitude, radial_amplitude, saved)


@_controls_backward.register_fake
def _(grad_eta, grad_delta, x, phase_amplitude, radial_amplitude, saved):
    grad_x, _ = passes.fake_backward(x, False)
    return grad_x, x.new_empty(3 * x.shape[2] + 4, dtype=torch.float32)


def _save_controls(ctx, inputs, output):
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs, output[2])


def _differentiate_controls(ctx, grad_eta, grad_delta, _grad_saved):
    x, *parameters, saved = ctx.saved_tensors
    grad_x, packed = _controls_backward(grad_eta, grad_delta, x, *parameters[2:], saved)
    width = x.shape[2]
    parts = torch.split(packed, [width, width + 1, width + 1, 1, 1])[1:]
    return grad_x, *(part.view(p.shape).to(p.dtype) for part, p in zip(parts, parameters, strict=True))


_controls.register_autograd(_differentiate_controls, setup_context=_save_controls)


def samu_scan(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence from given controls; see :func:`samu_lm.ops.samu`. Returns y and the final state."""
    save = _wants_gradient(x, eta, delta, nu_log, theta_log, initial_state)
    y, final_state, _ = _scan(x, eta, delta, nu_log, theta_log, first, initial_state, save, signature())
    return y, final_state


def samu_controls(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> tuple[Tensor, Tensor]:
    """The two controls per token; see :func:`samu_lm.ops.samu_controls`. Returns eta and delta, float32 ``[B, L]``."""
    eta, delta, _ = _controls(x, phase_direction, radial_direction, phase_amplitude, radial_amplitude)
    return eta, delta


def samu_mixer(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    phase_direction: Tensor,
    radial_direction: Tensor,
    phase_amplitude: Tensor,
    radial_amplitude: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Controls and recurrence in one op; see :func:`samu_lm.ops.samu_mixer`. Returns y and the final state."""
    parameters = (nu_log, theta_log, phase_direction, radial_direction, phase_amplitude, radial_amplitude)
    save = _wants_gradient(x, *parameters, initial_state)
    if is_plain(x):
        if save:
            return _EagerMixer.apply(x, *parameters, first, initial_state)
        return passes.mixer_forward(x, passes.Parameters(*parameters), first, initial_state, False)[:2]
    y, final_state, _ = _mixer(x, *parameters, first, initial_state, save, signature())
    return y, final_state
