"""Layers that blocks and mixers share: norm and short convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samu_lm.model import init
from samu_lm.ops import causal_conv1d
from samu_lm.ops.backend import BACKENDS
from samu_lm.ops.residual_norm import EPS


class OnBackend:
    """A module that runs an op of this package.

    Attributes:
        op: the op's name.
        backend: ``auto``, ``reference`` or ``triton``.
    """

    op: str
    backend: str


def check_backend(backend: str) -> str:
    """Refuses a backend that no op knows."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    return backend


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type of activations made from x: autocast's where it is on, otherwise x's own."""
    kind = x.device.type
    # Not torch.amp.is_autocast_available, which torch 2.11 cannot trace.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module may be worked out by an op in its place: no other kind, and nobody listens or steps in."""
    heard = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is kind and not heard and "forward" not in module.__dict__


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + 1e-6) * (1 + scale), worked out in float32, returned in x's dtype; scale starts at 0."""

    eps: float = EPS

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.scale.float())).to(x.dtype)


class CausalConv1d(OnBackend, nn.Module):
    """Depthwise convolution over time with ``weight[W, K]`` and ``bias[W]`` that stops at resets."""

    op = "causal_conv1d"

    def __init__(self, width: int, taps: int = 4, backend: str = "auto") -> None:
        super().__init__()
        if taps < 1:
            raise ValueError(f"conv_width={taps}: must be at least 1")
        self.backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.bias = nn.Parameter(torch.empty(width))
        init.convolution_(self.weight, self.bias)

    def forward(self, x: Tensor, reset: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns y ``[B, L, W]`` and the state ``[B, K-1, W]`` after the last token."""
        y, final_state = causal_conv1d(
            x, self.weight, self.bias, reset=reset, initial_state=state, output_final_state=True, backend=self.backend
        )
        assert final_state is not None
        return y, final_state
