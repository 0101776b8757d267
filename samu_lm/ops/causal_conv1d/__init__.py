"""Causal depthwise convolution over time that stops at resets; sits before every mixer."""

from __future__ import annotations

from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import check_activations, check_reset, check_shape
from samu_lm.ops.resets import first_token_mask


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Depthwise convolution of each channel with its last K inputs of the same document; float32 sums.

    Args:
        x: activations ``[B, L, W]``, float32, bfloat16 or float16.
        weight: ``[W, K]``, K = 4 in the model; ``weight[:, K-1]`` multiplies the current token, ``weight[:, 0]`` the
            oldest (the order of ``torch.nn.Conv1d``).
        bias: ``[W]``.
        reset: bool ``[B, L]``, True at each document's first token; nothing before it is seen.
        initial_state: ``[B, K-1, W]``, the row's last inputs, oldest first; the row then continues.
        output_final_state: return the state after the last token.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``(y, final_state)``: y ``[B, L, W]``, final_state ``[B, K-1, W]`` or None, both in x's dtype.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    batch, _, width = check_activations(x)
    taps = weight.shape[1] if weight.dim() == 2 else 0
    if taps < 1:
        raise ValueError(f"weight.shape={tuple(weight.shape)}: must be [width, taps] with at least one tap")
    check_shape(weight, (width, taps), "weight", like=x)
    check_shape(bias, (width,), "bias", like=x)
    check_reset(reset, x)
    if initial_state is not None:
        check_shape(initial_state, (batch, taps - 1, width), "initial_state", like=x)
    chosen = choose_backend("causal_conv1d", backend, x)
    if chosen == "triton" and x.numel():
        from samu_lm.ops.causal_conv1d.kernel import causal_conv1d as run

        first = reset  # nothing precedes a fresh row, whether or not its first token is marked
    else:
        from samu_lm.ops.causal_conv1d.reference import causal_conv1d as run

        first = first_token_mask(reset, initial_state)
    y, final_state = run(x, weight, bias, first, initial_state)
    return y, final_state if output_final_state else None


__all__ = ["causal_conv1d"]
