"""Recurrent residual block: norm, gated recurrent branch, norm, gated MLP.

Shapes: B rows, L tokens, D model width, W width of the recurrence, K convolution taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from samu_lm.model import init
from samu_lm.model.fp8 import MULTIPLE
from samu_lm.model.gated_delta import GatedDelta
from samu_lm.model.layers import CausalConv1d, OnBackend, RMSNorm, check_backend
from samu_lm.model.mixers import RGLRU, SAMU, build_mixer
from samu_lm.model.products import bare_product, is_plain, product, whole_product
from samu_lm.model.stream import Stream
from samu_lm.ops.backend import choose_backend
from samu_lm.ops.gated_gelu import gated_gelu, gelu_product

BlockState = tuple[Tensor, Tensor]
# Tokens whose gate and MLP activations are held at once while a block spares memory: 6 GiB at width 1536 in bfloat16.
PIECE = 131_072


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


class MLP(OnBackend, nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)) with hidden width ``expansion * D``.

    Where it trains on kernels, gate and up are one projection and the activation with both biases is one op
    (:func:`samu_lm.ops.gated_gelu.gated_gelu`).
    """

    op = "gated_gelu"

    def __init__(self, width: int, expansion: int, depth: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = check_backend(backend)
        self.gate = nn.Linear(width, expansion * width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        init.linear_(self.gate)
        init.linear_(self.up)
        init.linear_(self.down, scale=2 / depth)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.down(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """What ``down`` takes: ``[..., D]`` to ``[..., expansion * D]``."""
        if not self._merges(x):
            return gelu_tanh(self.gate(x)) * self.up(x)
        weight = torch.cat([self.gate.weight, self.up.weight])
        bias = torch.cat([self.gate.bias, self.up.bias])
        return gated_gelu(product(x, weight), bias, backend=self.backend)

    def _merges(self, x: Tensor) -> bool:
        """Whether to lay the weights together: only for a backward pass does it save more than it costs."""
        plain = is_plain(self.gate) and is_plain(self.up)
        biased = self.gate.bias is not None and self.up.bias is not None
        return (
            plain and biased and torch.is_grad_enabled() and choose_backend("gated_gelu", self.backend, x) == "triton"
        )


class RecurrentBlock(OnBackend, nn.Module):
    """One residual block of the model.

    On kernels, an addition to the stream and the norm behind it are one op
    (:func:`samu_lm.ops.residual_norm.residual_norm`), and so are the recurrence's gate and its product
    (:func:`samu_lm.ops.gated_gelu.gelu_product`); they add the biases of the products before them.

    Args:
        width: D, model width.
        rnn_width: W, width of the recurrence.
        mixer: ``samu``, ``rglru`` or ``gated_delta``; the last brings its own projections and convolution, and has W
            channels of values.
        depth: blocks of the whole model; scales the initialisation of the two output projections.
        num_blocks: gate blocks of RG-LRU.
        conv_width: taps K of the convolution.
        mlp_expansion: hidden width of the MLP over D.
        backend: ``auto``, ``reference`` or ``triton`` for the convolution, the mixer and the MLP's activation.
        num_heads: heads of the gated delta rule.

    Raises:
        ValueError: a size does not suit the mixer.
    """

    op = "residual_norm"

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
        num_heads: int = 8,
    ) -> None:
        super().__init__()
        self.backend = check_backend(backend)
        self.norm = RMSNorm(width)
        self.mixer: SAMU | RGLRU | GatedDelta
        if mixer == "gated_delta":
            self.mixer = GatedDelta(width, rnn_width, num_heads, conv_width, depth, backend)
        else:
            self.linear_x = nn.Linear(width, rnn_width)
            self.linear_y = nn.Linear(width, rnn_width)
            self.conv = CausalConv1d(rnn_width, conv_width, backend)
            self.mixer = build_mixer(mixer, rnn_width, num_blocks, backend)
            self.linear_out = nn.Linear(rnn_width, width)
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(width, mlp_expansion, depth, backend)
        if mixer != "gated_delta":
            init.linear_(self.linear_x)
            init.linear_(self.linear_y)
            init.linear_(self.linear_out, scale=2 / depth)

    def forward(
        self,
        x: Tensor | Stream,
        reset: Tensor | None = None,
        state: BlockState | None = None,
        return_state: bool = False,
        spare: str = "none",
        defer: bool = False,
    ) -> Any:
        """Updates the residual stream.

        Args:
            x: residual stream ``[B, L, D]``.
            reset: bool ``[B, L]``, True at first tokens.
            state: the convolution's and the recurrence's, of :meth:`state_shapes`; the rows then continue.
            return_state: return ``(x, state)`` instead of x.
            spare: what the backward pass works out again, MLP and gate :data:`PIECE` tokens at a time: ``none``;
                ``selective``, all but the recurrence; ``block``, the recurrence too (without states).
            defer: leave the last addition to the next norm where that saves a pass; x is then a
                :class:`samu_lm.model.stream.Stream`.
        """
        if spare == "none":
            stream, new_state = self._update(Stream.of(x), reset, state, return_state)
            out = stream if defer and self._on_kernels(stream.x) else stream.added()
            return out if new_state is None else (out, new_state)
        x = Stream.of(x).added()
        if spare == "block":
            recurrent = checkpoint(self._recur, x, reset, use_reentrant=False)
            if isinstance(self.mixer, GatedDelta):
                return in_pieces(self._add_mlp, x + recurrent)
            return in_pieces(self._combine_spared, x, recurrent)
        if isinstance(self.mixer, GatedDelta):
            branch, new_state = self.mixer.mix(self.norm(x), reset, state, return_state)
            x = in_pieces(self._add_mlp, x + branch)
            return x if new_state is None else (x, new_state)
        conv_state, mixer_state = (None, None) if state is None else state
        convolved, conv_state = checkpoint(self._convolve, x, None, reset, conv_state, use_reentrant=False)
        recurrent, mixer_state = self.mixer.mix(convolved, reset, mixer_state, return_state)
        x = in_pieces(self._combine_spared, x, recurrent)
        return x if mixer_state is None else (x, (conv_state, mixer_state))

    def _update(
        self, stream: Stream, reset: Tensor | None, state: BlockState | None, return_state: bool
    ) -> tuple[Stream, BlockState | None]:
        """The stream, its last addition not made, and the states where asked."""
        x, n, again = stream.normed(self.norm, self.backend, uses=2)
        if isinstance(self.mixer, GatedDelta):
            branch, new_state = self.mixer.mix(n, reset, state, return_state)
            x, hidden = self._add_and_hidden(Stream(x, branch))
        else:
            conv_state, mixer_state = (None, None) if state is None else state
            convolved, conv_state = self._convolve(x, n, reset, conv_state)
            recurrent, mixer_state = self.mixer.mix(convolved, reset, mixer_state, return_state)
            new_state = None if mixer_state is None else (conv_state, mixer_state)
            x, hidden = self._mix_and_hidden(x, again, recurrent)
        if not self._on_kernels(x):
            return Stream(x, self.mlp.down(hidden)), new_state
        return Stream(x, *bare_product(self.mlp.down, hidden)), new_state

    def compile_parts(self, **options: Any) -> None:
        """Compiles what lies around the recurrence, for models whose checkpoints run outside of the compiler.

        The MLP's last product stays outside where it is a plain one: what is worked out again ends before it, as the
        backward pass needs its input alone, and a compiled part can only be worked out as a whole.

        Args:
            options: of ``torch.compile``.
        """
        plain = type(self.mlp.down) is nn.Linear
        if isinstance(self.mixer, GatedDelta):
            names = ["_add_and_hidden" if plain else "_add_mlp"]
        else:
            names = ["_convolve", "_mix_and_hidden" if plain else "_combine_spared"]
        for name in names:
            # A method, not a function that holds this block: a deep copy of the block gets its own.
            setattr(self, name, MethodType(torch.compile(getattr(type(self), name), **options), self))

    def _on_kernels(self, x: Tensor) -> bool:
        return choose_backend(self.op, self.backend, x) == "triton"

    def _recur(self, x: Tensor, reset: Tensor | None) -> Tensor:
        """The recurrence's output, from the residual stream."""
        if isinstance(self.mixer, GatedDelta):
            return self.mixer.mix(self.norm(x), reset, None, False)[0]
        convolved, _ = self._convolve(x, None, reset, None)
        return self.mixer.mix(convolved, reset, None, False)[0]

    def _convolve(
        self, x: Tensor, n: Tensor | None, reset: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The recurrence's input, and the convolution's state; n is norm(x) where that is kept."""
        return self.conv(whole_product(self.linear_x, self.norm(x) if n is None else n), reset, state)

    def _combine_spared(self, x: Tensor, recurrent: Tensor) -> Tensor:
        """Adds the gated recurrence, then the MLP."""
        x, hidden = self._mix_and_hidden(x, None, recurrent)
        return x + whole_product(self.mlp.down, hidden)

    def _mix_and_hidden(self, x: Tensor, n: Tensor | None, recurrent: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with the gated recurrence added, and what the MLP's last product takes."""
        n = self.norm(x) if n is None else n
        if not self._on_kernels(x):
            branch = self.linear_out(recurrent * gelu_tanh(self.linear_y(n)))
            return self._add_and_hidden(Stream(x, branch))
        gate, bias = bare_product(self.linear_y, n)
        if bias is None:
            gated = recurrent * gelu_tanh(gate)
        else:
            gated = gelu_product(gate, recurrent, bias, backend=self.backend)
        return self._add_and_hidden(Stream(x, *bare_product(self.linear_out, gated)))

    def _add_and_hidden(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The stream, and what the MLP's last product takes."""
        x, n = stream.normed(self.mlp_norm, self.backend)
        return x, self.mlp.hidden(n)

    def _add_mlp(self, x: Tensor) -> Tensor:
        x, hidden = self._add_and_hidden(Stream(x))
        return x + whole_product(self.mlp.down, hidden)

    # -- sizes ---------------------------------------------------------------------------------------------------

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the convolution's and the recurrence's state, without the rows."""
        if isinstance(self.mixer, GatedDelta):
            return self.mixer.state_shapes()
        width, taps = self.conv.weight.shape
        return (taps - 1, width), (width,)

    def matmul_flops_per_token(self) -> int:
        """Forward FLOPs per token in matrix products; a multiply-add is 2."""
        linears = [m for m in self.modules() if isinstance(m, nn.Linear)]
        inside = 0 if isinstance(self.mixer, GatedDelta) else self.mixer.matmul_flops_per_token()
        return sum(2 * m.in_features * m.out_features for m in linears) + inside

    def recurrence_flops_per_token(self) -> int:
        """Forward FLOPs per token of the recurrence and the convolution."""
        taps, channels = self.state_shapes()[0][0] + 1, self.state_shapes()[0][1]
        return self.mixer.recurrence_flops_per_token() + 2 * taps * channels


def in_pieces(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A checkpointed function of tokens ``[B, L, ...]``, each independent of the others, some tokens at a time.

    All but the last piece have a multiple of 16 tokens, which products in float8 want.
    """
    rows = max(1, tensors[0].shape[0])
    unit = MULTIPLE // math.gcd(rows, MULTIPLE)
    length = max(unit, PIECE // rows // unit * unit)
    if tensors[0].shape[1] <= length:
        return checkpoint(function, *tensors, use_reentrant=False)
    pieces = zip(*(tensor.split(length, 1) for tensor in tensors), strict=True)
    return torch.cat([checkpoint(function, *piece, use_reentrant=False) for piece in pieces], 1)
