"""Products of a gate's GELU and what it lets through, in one pass that adds the gate's bias too.

``gated_gelu`` is the MLP's, gate and up side by side; ``gelu_product`` a recurrence's, gate and up apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import check_floating, check_shape, refuse_forward_mode


def gated_gelu(x: Tensor, bias: Tensor, *, backend: str = "auto") -> Tensor:
    """gelu_tanh(x[..., :F] + bias[:F]) * (x[..., F:] + bias[F:]), worked out in float32 at least.

    Args:
        x: gate and up projections side by side, ``[..., 2F]``, any floating type.
        bias: ``[2F]``, of both.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., F]`` in x's dtype.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    refuse_forward_mode()
    check_floating(x, "x")
    if x.dim() < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"x.shape={tuple(x.shape)}: the last dimension must hold two halves of one width")
    check_shape(bias, (x.shape[-1],), "bias", like=x)
    if _on_kernels(x, backend):
        from samu_lm.ops.gated_gelu.kernel import gated_gelu as run
    else:
        from samu_lm.ops.gated_gelu.reference import gated_gelu as run
    return run(x, bias)


def gelu_product(gate: Tensor, up: Tensor, bias: Tensor, *, backend: str = "auto") -> Tensor:
    """gelu_tanh(gate + bias) * up, worked out in float32 at least.

    On the kernels, the bias's gradient is summed in float32 along with the other gradients.

    Args:
        gate: projection without its bias, ``[..., F]``, any floating type.
        up: what the gate lets through, ``[..., F]`` in gate's dtype.
        bias: ``[F]``, of gate alone.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., F]`` in gate's dtype.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    refuse_forward_mode()
    check_floating(gate, "gate")
    if gate.dim() < 1 or gate.shape[-1] < 1:
        raise ValueError(f"gate.shape={tuple(gate.shape)}: the last dimension must hold at least one channel")
    check_shape(up, tuple(gate.shape), "up", like=gate)
    if up.dtype != gate.dtype:
        raise TypeError(f"up.dtype={up.dtype}: must be the dtype of gate, {gate.dtype}; convert one of them")
    check_shape(bias, (gate.shape[-1],), "bias", like=gate)
    if _on_kernels(gate, backend):
        from samu_lm.ops.gated_gelu.kernel import gelu_product as run
    else:
        from samu_lm.ops.gated_gelu.reference import gelu_product as run
    return run(gate, up, bias)


def _on_kernels(x: Tensor, backend: str) -> bool:
    """Whether Triton runs; its kernels work in float32, so float64 goes to the reference."""
    return choose_backend("gated_gelu", "reference" if x.dtype == torch.float64 else backend, x) == "triton"


__all__ = ["gated_gelu", "gelu_product"]
