"""A residual addition and the RMS norm behind it, in one pass over the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import check_device, check_floating, check_shape, refuse_forward_mode

EPS = 1e-6


def residual_norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    *,
    eps: float = EPS,
    uses: int = 1,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """x + branch + bias, and its RMS norm: s and s * rsqrt(mean(s^2) + eps) * (1 + scale) of the sum s.

    Sums, statistics and the gradients of bias and scale are worked out in float32 at least; the norm is that of s as it
    is returned.

    Args:
        x: residual stream ``[..., D]``, any floating type.
        branch: ``[..., D]``, what is added to it.
        bias: ``[D]``, added to every token; may be missing.
        scale: ``[D]``, of the norm.
        eps: added to the mean square.
        uses: 1, or 2 to get the norm twice, one for each of two uses: their gradients then need no sum of their own.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        The stream in x's dtype, and the norm in branch's dtype once or twice, ``[..., D]`` each.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    refuse_forward_mode()
    for name, tensor in (("x", x), ("branch", branch)):
        check_floating(tensor, name)
    if uses not in (1, 2):
        raise ValueError(f"uses={uses}: must be 1 or 2")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x.shape={tuple(x.shape)}: must end in at least one channel")
    if branch.shape != x.shape:
        raise ValueError(f"branch.shape={tuple(branch.shape)}: must be x's, {list(x.shape)}")
    check_device(branch, "branch", x)
    if bias is not None:
        check_shape(bias, (x.shape[-1],), "bias", like=x)
    check_shape(scale, (x.shape[-1],), "scale", like=x)
    wide = torch.float64 in (x.dtype, branch.dtype)  # the kernels work in float32
    if choose_backend("residual_norm", "reference" if wide else backend, x) == "triton":
        from samu_lm.ops.residual_norm.kernel import residual_norm as run
    else:
        from samu_lm.ops.residual_norm.reference import residual_norm as run
    return run(x, branch, bias, scale, eps, uses)


__all__ = ["EPS", "residual_norm"]
