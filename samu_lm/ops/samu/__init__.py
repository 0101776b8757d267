"""SAMU: a complex diagonal recurrence whose decay and rotation two controls per token steer.

The public functions check their arguments and choose between ``reference.py`` (plain PyTorch, the definition) and
``kernel.py`` (Triton).

Shapes: B rows, L tokens, W width, M = W/2 complex modes; x ``[B, L, W]`` holds real parts, then imaginary parts.
"""

from __future__ import annotations

from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import check_activations, check_reset, check_shape
from samu_lm.ops.resets import first_token_mask


def _check_width(width: int) -> int:
    if width < 2 or width % 2:
        raise ValueError(
            f"x.shape[-1]={width}: SAMU reads pairs of real and imaginary parts, so the width must be even"
        )
    return width // 2


def _check_scan(
    x: Tensor, nu_log: Tensor, theta_log: Tensor, reset: Tensor | None, initial_state: Tensor | None
) -> tuple[int, int, int]:
    batch, length, width = check_activations(x)
    modes = _check_width(width)
    check_shape(nu_log, (modes,), "nu_log", like=x)
    check_shape(theta_log, (modes,), "theta_log", like=x)
    check_reset(reset, x)
    if initial_state is not None:
        check_shape(initial_state, (batch, width), "initial_state", like=x)
    return batch, length, width


def _nothing_to_scan(x: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of no tokens: the state passes through."""
    state = x.new_zeros(x.shape[0], x.shape[2]).float() if initial_state is None else initial_state.float().clone()
    return x.clone(), state


def samu_controls(
    x: Tensor,
    phase_direction: Tensor,
    radial_direction: Tensor,
    phase_amplitude: Tensor,
    radial_amplitude: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The two controls of every token, shared by all modes; worked out in float32.

    Args:
        x: activations ``[B, L, W]``.
        phase_direction, radial_direction: ``[W + 1]``; only the direction counts, the last entry is the bias.
        phase_amplitude, radial_amplitude: scalars ``[]``; at 0 the controls are 0 and only they receive gradient.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``(eta, delta)``, float32 ``[B, L]``: log of the decay's stretch, and the angle in radians.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    _, _, width = check_activations(x)
    _check_width(width)
    _check_controls(x, phase_direction, radial_direction, phase_amplitude, radial_amplitude)
    if choose_backend("samu_controls", backend, x) == "triton" and x.numel():
        from samu_lm.ops.samu import kernel

        return kernel.samu_controls(x, phase_direction, radial_direction, phase_amplitude, radial_amplitude)
    from samu_lm.ops.samu import reference

    return reference.samu_controls(x, phase_direction, radial_direction, phase_amplitude, radial_amplitude)


def _check_controls(
    x: Tensor, phase_direction: Tensor, radial_direction: Tensor, phase_amplitude: Tensor, radial_amplitude: Tensor
) -> None:
    width = x.shape[-1]
    check_shape(phase_direction, (width + 1,), "phase_direction", like=x)
    check_shape(radial_direction, (width + 1,), "radial_direction", like=x)
    check_shape(phase_amplitude, (), "phase_amplitude", like=x)
    check_shape(radial_amplitude, (), "radial_amplitude", like=x)


def samu(
    x: Tensor,
    eta: Tensor,
    delta: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """SAMU recurrence from given controls, float32 carry; differentiable in every tensor input.

    Args:
        x: activations ``[B, L, 2M]``, float32, bfloat16 or float16.
        eta, delta: controls ``[B, L]`` float32, of :func:`samu_controls`.
        nu_log, theta_log: logs of decay and angle (radians) per token, ``[M]``.
        reset: bool ``[B, L]``, True at each document's first token. Without an initial state the first token of every
            row is a first token in any case.
        initial_state: ``[B, 2M]`` float32 (real parts, then imaginary parts); the row then continues.
        output_final_state: return the state after the last token.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``(y, final_state)``: y ``[B, L, 2M]`` in x's dtype, final_state ``[B, 2M]`` float32 or None.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    batch, length, _ = _check_scan(x, nu_log, theta_log, reset, initial_state)
    check_shape(eta, (batch, length), "eta", like=x)
    check_shape(delta, (batch, length), "delta", like=x)
    chosen = choose_backend("samu", backend, x)
    if x.numel() == 0:
        y, final_state = _nothing_to_scan(x, initial_state)
    else:
        first = first_token_mask(reset, initial_state)
        if chosen == "triton":
            from samu_lm.ops.samu.kernel import samu_scan as run
        else:
            from samu_lm.ops.samu.reference import samu_scan as run
        y, final_state = run(x, eta, delta, nu_log, theta_log, first, initial_state)
    return y, final_state if output_final_state else None


def samu_mixer(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor,
    phase_direction: Tensor,
    radial_direction: Tensor,
    phase_amplitude: Tensor,
    radial_amplitude: Tensor,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The whole SAMU mixer, controls and recurrence, as one call that a backend may fuse.

    The same function as :func:`samu_controls` followed by :func:`samu`; arguments, results and errors as there.
    """
    _check_scan(x, nu_log, theta_log, reset, initial_state)
    controls = (phase_direction, radial_direction, phase_amplitude, radial_amplitude)
    _check_controls(x, *controls)
    if choose_backend("samu", backend, x) == "triton" and x.numel():
        from samu_lm.ops.samu import kernel

        # A kernel starts a row without a state at zero, whether or not its first token is marked.
        y, final_state = kernel.samu_mixer(x, nu_log, theta_log, *controls, reset, initial_state)
        return y, final_state if output_final_state else None
    eta, delta = samu_controls(x, *controls, backend=backend)
    return samu(
        x,
        eta,
        delta,
        nu_log,
        theta_log,
        reset=reset,
        initial_state=initial_state,
        output_final_state=output_final_state,
        backend=backend,
    )


__all__ = ["samu", "samu_controls", "samu_mixer"]
