"""The gated delta rule as a mixer, as in Gated DeltaNet (arXiv 2412.06464): from and to the residual stream's width.

Shapes: B rows, L tokens, D model width, W = H * d channels of queries, keys and values each, H heads of d channels,
K convolution taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samu_lm.model import init
from samu_lm.model.layers import CausalConv1d, OnBackend, RMSNorm, check_backend
from samu_lm.ops import gated_delta_rule
from samu_lm.ops.backend import choose_backend
from samu_lm.ops.gated_delta import WIDEST_KEY

DeltaState = tuple[Tensor, Tensor]


class GatedDelta(OnBackend, nn.Module):
    """Gated DeltaNet's token mixer: projections, short convolution, gated delta rule, gated norm, output projection.

    q, k and v are SiLU of a causal convolution of linear maps, q and k brought to norm 1 per head;
    beta = sigmoid(linear), log_alpha = -exp(rate_log) * softplus(linear + step_bias), per head; the output is
    ``linear_out(norm(o) * silu(linear_gate(x)))`` with a norm over each head's channels.

    Args:
        width: D.
        rnn_width: W, divisible by ``num_heads``.
        num_heads: H.
        conv_width: taps K.
        depth: blocks of the whole model; scales the initialisation of the output projection.
        backend: ``triton`` for the kernels (``ssd``), ``reference`` for plain PyTorch (``chunked``); ``auto`` takes the
            kernels on a GPU, for heads of at most 128 channels.

    Raises:
        ValueError: ``rnn_width`` does not divide into the heads, or the backend is unknown.
    """

    op = "gated_delta_rule"

    def __init__(
        self,
        width: int,
        rnn_width: int,
        num_heads: int = 8,
        conv_width: int = 4,
        depth: int = 1,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.check_width(rnn_width, num_heads)
        self.width, self.rnn_width, self.num_heads = width, rnn_width, num_heads
        wide = rnn_width // num_heads > WIDEST_KEY  # for the kernels
        self.conv_width = conv_width
        self.backend = "reference" if check_backend(backend) == "auto" and wide else backend
        self.linear_qkv = nn.Linear(width, 3 * rnn_width, bias=False)
        self.linear_gate = nn.Linear(width, rnn_width, bias=False)
        self.linear_controls = nn.Linear(width, 2 * num_heads, bias=False)
        self.conv = CausalConv1d(3 * rnn_width, conv_width, backend)
        self.rate_log = nn.Parameter(torch.empty(num_heads))
        self.step_bias = nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(rnn_width // num_heads)
        # As published. A first token's output is v times q.k, which may be close to 0: rounding is amplified less.
        self.norm.eps = 1e-5
        self.linear_out = nn.Linear(rnn_width, width, bias=False)
        for linear in (self.linear_qkv, self.linear_gate, self.linear_controls):
            init.linear_(linear)
        init.linear_(self.linear_out, scale=2 / depth)
        self.reset_parameters()

    @staticmethod
    def check_width(rnn_width: int, num_heads: int) -> None:
        """Raises ValueError unless the width divides into the heads."""
        if num_heads < 1:
            raise ValueError(f"num_heads={num_heads}: must be at least 1")
        if rnn_width < 1 or rnn_width % num_heads:
            remedy = max(1, round(rnn_width / num_heads)) * num_heads
            raise ValueError(f"rnn_width={rnn_width}: must be divisible by num_heads={num_heads}; try {remedy}")

    def reset_parameters(self) -> None:
        """Draws the decays and the convolution's taps (the linear maps are drawn where they are made)."""
        init.delta_decay_(self.rate_log, self.step_bias)
        # Values of about unit size: only the norm scales them up again, and its epsilon must stay small beside them.
        nn.init.uniform_(self.conv.weight, -(self.conv_width**-0.5), self.conv_width**-0.5)

    def forward(
        self, x: Tensor, reset: Tensor | None = None, state: DeltaState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, DeltaState]:
        """Mixes x ``[B, L, D]`` over time.

        Args:
            x: activations ``[B, L, D]``.
            reset: bool ``[B, L]``, True at first tokens.
            state: of :meth:`state_shapes`; the rows then continue.
            return_state: return ``(y, state)`` instead of y.
        """
        y, new_state = self.mix(x, reset, state, return_state)
        return y if new_state is None else (y, new_state)

    def mix(
        self, x: Tensor, reset: Tensor | None, state: DeltaState | None, return_state: bool
    ) -> tuple[Tensor, DeltaState | None]:
        """Returns y ``[B, L, D]`` and, where asked, the state after the last token."""
        conv_state, delta_state = (None, None) if state is None else state
        qkv, conv_state = self.conv(self.linear_qkv(x), reset, conv_state)
        q, k, v = F.silu(qkv).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        step, beta = self.linear_controls(x).float().chunk(2, -1)
        log_alpha = -self.rate_log.float().exp() * F.softplus(step + self.step_bias.float())
        o, delta_state = self.recur(_unit(q), _unit(k), v, log_alpha, beta.sigmoid(), reset, delta_state, return_state)
        gated = self.norm(o).flatten(-2) * F.silu(self.linear_gate(x))
        return self.linear_out(gated), None if delta_state is None else (conv_state, delta_state)

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        beta: Tensor,
        reset: Tensor | None,
        state: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence alone, on the implementation that suits backend and length."""
        implementation = "ssd" if choose_backend(self.op, self.backend, q) == "triton" else "chunked"
        if q.shape[1] == 1:
            implementation = "recurrent"  # one token fills no chunk
        return gated_delta_rule(
            q, k, v, log_alpha, beta,
            reset=reset, initial_state=state, output_final_state=return_state, implementation=implementation,
        )  # fmt: skip

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the convolution's state ``[K-1, 3 W]`` and the recurrence's ``[H, d, d]``, without the rows."""
        d = self.rnn_width // self.num_heads
        return (self.conv_width - 1, 3 * self.rnn_width), (self.num_heads, d, d)

    def recurrence_flops_per_token(self) -> int:
        """Forward FLOPs per token of the recurrence as defined: decay, read by k, update, read by q (7 per entry)."""
        return 7 * self.rnn_width * (self.rnn_width // self.num_heads)

    def extra_repr(self) -> str:
        return f"width={self.width}, rnn_width={self.rnn_width}, num_heads={self.num_heads}, backend={self.backend!r}"


def _unit(x: Tensor) -> Tensor:
    """x over its norm along the last axis, worked out in float32, in x's dtype; 0 stays 0."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
