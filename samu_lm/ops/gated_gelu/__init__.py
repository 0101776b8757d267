"""The MLP's activation: gelu(gate + bias) * (up + bias), in one pass over both halves of a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import FLOATING, check_shape, refuse_forward_mode


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
    if not x.is_floating_point():
        raise TypeError(f"x.dtype={x.dtype}: must be {FLOATING}")
    if x.dim() < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"x.shape={tuple(x.shape)}: the last dimension must hold two halves of one width")
    check_shape(bias, (x.shape[-1],), "bias", like=x)
    backend = "reference" if x.dtype == torch.float64 else backend  # the kernels work in float32
    if choose_backend("gated_gelu", backend, x) == "triton":
        from samu_lm.ops.gated_gelu.kernel import gated_gelu as run
    else:
        from samu_lm.ops.gated_gelu.reference import gated_gelu as run
    return run(x, bias)


__all__ = ["gated_gelu"]
