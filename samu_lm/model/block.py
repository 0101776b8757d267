"""Recurrent residual block (SPEC section 4): norm, gated recurrent branch, norm, gated MLP.

Shapes: B rows, L tokens, D model width, W width of the recurrence, K convolution taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samu_lm.model import init
from samu_lm.model.mixers import build_mixer, check_backend
from samu_lm.ops import causal_conv1d

BlockState = tuple[Tensor, Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + 1e-6) * (1 + scale), worked out in float32, returned in x's dtype; scale starts at 0."""

    eps = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.scale.float())).to(x.dtype)


class CausalConv1d(nn.Module):
    """Depthwise convolution over time with ``weight[W, K]`` and ``bias[W]`` that stops at resets."""

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


class MLP(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)) with hidden width ``expansion * D``."""

    def __init__(self, width: int, expansion: int, depth: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, expansion * width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        init.linear_(self.gate)
        init.linear_(self.up)
        init.linear_(self.down, scale=2 / depth)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.down(gelu_tanh(self.gate(x)) * self.up(x))


class RecurrentBlock(nn.Module):
    """One residual block of the model.

    Args:
        width: D, model width.
        rnn_width: W, width of the recurrence.
        mixer: ``samu`` or ``rglru``.
        depth: blocks of the whole model; scales the initialisation of the two output projections.
        num_blocks: gate blocks of RG-LRU.
        conv_width: taps K of the convolution.
        mlp_expansion: hidden width of the MLP over D.
        backend: ``auto``, ``reference`` or ``triton`` for the convolution and the mixer.

    Raises:
        ValueError: a size does not suit the mixer.
    """

    def __init__(
        self,
        width: int,
        rnn_width: int,
        mixer: str = "samu",
        depth: int = 1,
        num_blocks: int = 16,
        conv_width: int = 4,
        mlp_expansion: int = 3,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.linear_x = nn.Linear(width, rnn_width)
        self.linear_y = nn.Linear(width, rnn_width)
        self.conv = CausalConv1d(rnn_width, conv_width, backend)
        self.mixer = build_mixer(mixer, rnn_width, num_blocks, backend)
        self.linear_out = nn.Linear(rnn_width, width)
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(width, mlp_expansion, depth)
        init.linear_(self.linear_x)
        init.linear_(self.linear_y)
        init.linear_(self.linear_out, scale=2 / depth)

    def forward(
        self, x: Tensor, reset: Tensor | None = None, state: BlockState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, BlockState]:
        """Updates the residual stream.

        Args:
            x: residual stream ``[B, L, D]``.
            reset: bool ``[B, L]``, True at first tokens.
            state: convolution state ``[B, K-1, W]`` and recurrence state ``[B, W]``; the rows then continue.
            return_state: return ``(x, state)`` instead of x.
        """
        conv_state, mixer_state = (None, None) if state is None else state
        n = self.norm(x)
        branch_y = gelu_tanh(self.linear_y(n))
        convolved, conv_state = self.conv(self.linear_x(n), reset, conv_state)
        recurrent, mixer_state = self.mixer.mix(convolved, reset, mixer_state, return_state)
        x = x + self.linear_out(recurrent * branch_y)
        x = x + self.mlp(self.mlp_norm(x))
        return x if mixer_state is None else (x, (conv_state, mixer_state))
