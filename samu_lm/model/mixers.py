"""The recurrences as modules: parameters, initialisation and a call into ``samu_lm.ops``.

Shapes: B rows, L tokens, W width (``rnn_width``), M = W/2 modes, H gate blocks of w = W/H channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samu_lm.model import init
from samu_lm.model.gated_delta import GatedDelta
from samu_lm.model.layers import OnBackend, check_backend
from samu_lm.ops import rglru_mixer, samu_mixer

MixerOutput = Tensor | tuple[Tensor, Tensor]


class Mixer(OnBackend, nn.Module):
    """A recurrence over time: what :class:`SAMU` and :class:`RGLRU` share."""

    def mix(
        self, x: Tensor, reset: Tensor | None, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y ``[B, L, W]`` and, where asked, the state ``[B, W]`` after the last token."""
        raise TypeError(f"{type(self).__name__} is not a mixer: it defines no mix()")

    def forward(
        self, x: Tensor, reset: Tensor | None = None, state: Tensor | None = None, return_state: bool = False
    ) -> MixerOutput:
        """Mixes x ``[B, L, W]`` over time.

        Args:
            x: activations ``[B, L, W]``.
            reset: bool ``[B, L]``, True at first tokens.
            state: float32 ``[B, W]``; the rows then continue.
            return_state: return ``(y, state)`` instead of y.
        """
        y, final_state = self.mix(x, reset, state, return_state)
        return y if final_state is None else (y, final_state)


class SAMU(Mixer):
    """SAMU mixer with one control group: 3 W + 4 parameters.

    Args:
        width: W, even.
        backend: ``auto``, ``reference`` or ``triton``.

    Raises:
        ValueError: ``width`` is odd or not positive.
    """

    op = "samu"

    def __init__(self, width: int, backend: str = "auto") -> None:
        super().__init__()
        self.check_width(width)
        self.width, self.backend = width, check_backend(backend)
        self.nu_log = nn.Parameter(torch.empty(width // 2))
        self.theta_log = nn.Parameter(torch.empty(width // 2))
        self.phase_direction = nn.Parameter(torch.empty(width + 1))
        self.radial_direction = nn.Parameter(torch.empty(width + 1))
        self.phase_amplitude = nn.Parameter(torch.empty(()))
        self.radial_amplitude = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @staticmethod
    def check_width(width: int) -> None:
        """Raises ValueError unless the width splits into pairs of real and imaginary parts."""
        if width < 2 or width % 2:
            raise ValueError(f"rnn_width={width}: SAMU needs an even width of at least 2; try {width + width % 2 or 2}")

    def reset_parameters(self) -> None:
        """Draws the spectrum and directions; both amplitudes start at 0, a fixed recurrence."""
        init.samu_spectrum_(self.nu_log, self.theta_log)
        nn.init.normal_(self.phase_direction)
        nn.init.normal_(self.radial_direction)
        nn.init.zeros_(self.phase_amplitude)
        nn.init.zeros_(self.radial_amplitude)

    def mix(
        self, x: Tensor, reset: Tensor | None, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Mixer.mix`."""
        return samu_mixer(
            x,
            self.nu_log,
            self.theta_log,
            self.phase_direction,
            self.radial_direction,
            self.phase_amplitude,
            self.radial_amplitude,
            reset=reset,
            initial_state=state,
            output_final_state=return_state,
            backend=self.backend,
        )

    def matmul_flops_per_token(self) -> int:
        """Forward FLOPs per token in matrix products: none, the controls are two dot products."""
        return 0

    def recurrence_flops_per_token(self) -> int:
        """Forward FLOPs per token outside matrix products: two dot products, and per mode one exponential, the turn
        (6), its scaling (2), the complex multiply-add (8), gamma (2) and the rectifier (2)."""
        return 4 * self.width + 21 * (self.width // 2)

    def extra_repr(self) -> str:
        return f"width={self.width}, backend={self.backend!r}"


class BlockDiagonalLinear(nn.Module):
    """H independent linear maps of w channels each: ``weight[H, w, w]``, ``bias[H, w]``."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        block_width = width // num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, block_width, block_width))
        self.bias = nn.Parameter(torch.empty(num_blocks, block_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights normal with variance 1/w; bias 0."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
        nn.init.zeros_(self.bias)


class RGLRU(Mixer):
    """RG-LRU mixer: gates from block-diagonal projections of the input, then the recurrence.

    Args:
        width: W, divisible by ``num_blocks``.
        num_blocks: H gate blocks.
        backend: ``auto``, ``reference`` or ``triton``.

    Raises:
        ValueError: the width does not divide into the blocks.
    """

    op = "rglru"

    def __init__(self, width: int, num_blocks: int = 16, backend: str = "auto") -> None:
        super().__init__()
        self.check_width(width, num_blocks)
        self.width, self.num_blocks, self.backend = width, num_blocks, check_backend(backend)
        self.input_gate = BlockDiagonalLinear(width, num_blocks)
        self.a_gate = BlockDiagonalLinear(width, num_blocks)
        self.a_param = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @staticmethod
    def check_width(width: int, num_blocks: int) -> None:
        """Raises ValueError unless the width divides into the gate blocks."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 1")
        if width < 1 or width % num_blocks:
            remedy = max(1, round(width / num_blocks)) * num_blocks
            raise ValueError(f"rnn_width={width}: must be divisible by num_blocks={num_blocks}; try {remedy}")

    def reset_parameters(self) -> None:
        """Draws the decays (the gates draw their own weights)."""
        init.rglru_decay_(self.a_param)

    def mix(
        self, x: Tensor, reset: Tensor | None, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Mixer.mix`."""
        return rglru_mixer(
            x,
            self.input_gate.weight,
            self.input_gate.bias,
            self.a_gate.weight,
            self.a_gate.bias,
            self.a_param,
            reset=reset,
            initial_state=state,
            output_final_state=return_state,
            backend=self.backend,
        )

    def matmul_flops_per_token(self) -> int:
        """Forward FLOPs per token in matrix products: the two gate projections."""
        return 4 * self.width * (self.width // self.num_blocks)

    def recurrence_flops_per_token(self) -> int:
        """Forward FLOPs per token outside matrix products: two sigmoids (4 each), a and b (6), input (2), step (2)."""
        return 18 * self.width

    def extra_repr(self) -> str:
        return f"width={self.width}, num_blocks={self.num_blocks}, backend={self.backend!r}"


MIXERS = ("samu", "rglru", "gated_delta")


def build_mixer(name: str, width: int, num_blocks: int, backend: str) -> SAMU | RGLRU:
    """The diagonal mixer called ``name``: ``samu`` or ``rglru`` (``num_blocks`` is RG-LRU's alone)."""
    check_mixer(name, width, num_blocks)
    return SAMU(width, backend) if name == "samu" else RGLRU(width, num_blocks, backend)


def check_mixer(name: str, width: int, num_blocks: int, num_heads: int = 8) -> None:
    """Raises ValueError unless ``name`` is a mixer and the width suits it."""
    if name not in MIXERS:
        raise ValueError(f"mixer={name!r}: must be one of {', '.join(MIXERS)}")
    if name == "samu":
        SAMU.check_width(width)
    elif name == "gated_delta":
        GatedDelta.check_width(width, num_heads)
    else:
        RGLRU.check_width(width, num_blocks)
