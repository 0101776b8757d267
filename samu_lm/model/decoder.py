"""Decoding on a GPU: one token for a few rows in five kernels a block, as one CUDA graph.

Letters: B rows, W width of the recurrence, M = W/2 modes, K convolution taps, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from samu_lm.model.block import RecurrentBlock
from samu_lm.model.lm import RecurrentLM
from samu_lm.model.mixers import RGLRU, SAMU
from samu_lm.model.state import ModelState
from samu_lm.ops.backend import TRITON_INSTALLED, interpreting

if TYPE_CHECKING:
    from samu_lm.ops.decode import BlockWeights, Linear, Plan, RGLRUWeights, SAMUWeights, Weights

# Each row is another pass over weights that lie in registers: beyond this, matrix products are faster.
MOST_ROWS = 16
_MAX_NU = 1e38


def why_not(model: RecurrentLM, batch_size: int = 1) -> str | None:
    """What keeps :class:`Decoder` from decoding ``batch_size`` rows of a model, or None; ``model.step`` always can."""
    device = model.embedding.weight.device
    if model.mixer == "gated_delta":
        return "mixer=gated_delta: the decoder has kernels for samu and rglru alone; use model.step"
    if not 1 <= batch_size <= MOST_ROWS:
        return f"batch_size={batch_size}: the decoder takes 1 to {MOST_ROWS} rows; use model.step"
    odd = [name for name in ("width", "rnn_width") if getattr(model, name) % 2]
    if odd:
        return f"{odd[0]}={getattr(model, odd[0])}: the decoder reads pairs and needs an even number; use model.step"
    if not TRITON_INSTALLED:
        return "the decoder needs the package triton; install it or use model.step"
    if device.type != "cuda" and not interpreting():
        return f"the model is on {device}: the decoder needs a GPU; move it or use model.step"
    return None


class Decoder:
    """Decodes a few rows token by token.

    Weights and the vectors that matrices are multiplied with are bfloat16; sums, residual stream and states float32.

    Matrices that are bfloat16 already are shared with the model, others are cast once; small parameters are worked out
    once. So make a new decoder after the weights have changed. The state lies at fixed addresses and is moved on in
    place: :attr:`state` and :meth:`load` copy it out and in.

    Args:
        model: on a GPU, with the mixer ``samu`` or ``rglru``.
        batch_size: rows B, 1 to 16.
        plan: sizes of the kernels; None for the default ones, by mixer and rows.
        activations: dtype of what matrices are multiplied with.

    Attributes:
        tokens: int64 ``[B]``, the ids that :meth:`advance` reads and replaces; 0 at first.
        last_logits: float32 ``[B, V]`` after the last token; overwritten by the next.

    Raises:
        ValueError: the model, its device or the number of rows do not suit (see :func:`why_not`).
    """

    def __init__(
        self,
        model: RecurrentLM,
        batch_size: int = 1,
        plan: Plan | None = None,
        activations: torch.dtype = torch.bfloat16,
    ) -> None:
        if reason := why_not(model, batch_size):
            raise ValueError(reason)
        from samu_lm.ops import decode

        self.plan = decode.default_plan(model.mixer, batch_size) if plan is None else plan
        self._device, self._dtype = model.embedding.weight.device, model.embedding.weight.dtype
        on_gpu = self._device.type == "cuda"
        self._overlaps = on_gpu and torch.cuda.get_device_capability(self._device) >= (9, 0)
        # Inside inference_mode the buffers would be tensors that nobody outside it may write.
        with torch.inference_mode(False), torch.no_grad():
            self._weights = weights_of(model)
            self._buffers = decode.make_buffers(self._weights, batch_size, model.vocab_size, self.plan, activations)
        self._run = decode.decode_token
        self._graph: torch.cuda.CUDAGraph | None = None
        self.tokens, self.last_logits = self._buffers.tokens, self._buffers.logits

    @property
    def batch_size(self) -> int:
        """Rows B."""
        return self.tokens.shape[0]

    def advance(self) -> None:
        """One greedy token a row: reads ``tokens``, writes the likeliest next ids there and their logits beside."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def logits(self, tokens: Tensor) -> Tensor:
        """One given token a row: ids int64 ``[B]``, below V, to logits of the next, float32 ``[B, V]``.

        The result is :attr:`last_logits`: copy what must outlive the next call.
        """
        if tokens.shape != self.tokens.shape:
            raise ValueError(f"tokens.shape={tuple(tokens.shape)}: must be {tuple(self.tokens.shape)}, one a row")
        self.tokens.copy_(tokens)
        self.advance()
        return self.last_logits

    def _launch(self) -> None:
        if self._device.type != "cuda":
            self._run(self._weights, self._buffers, self.plan, self._overlaps)
            return
        with torch.cuda.device(self._device):
            self._run(self._weights, self._buffers, self.plan, self._overlaps)

    def capture(self) -> Decoder:
        """Records the launches as a CUDA graph, which calls then replay; tokens and state stay. Returns the decoder."""
        tokens, state = self.tokens.clone(), self.state
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._launch()  # compiles
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._launch()
        self._graph = graph
        self.load(state)
        self.tokens.copy_(tokens)
        return self

    # -- the state -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empties the state: the next token of every row is a first token."""
        self._buffers.seen.zero_()

    @property
    def state(self) -> ModelState:
        """A copy of the state in the model's form."""
        buffers = self._buffers
        depth, _, taps, width = buffers.ring.shape
        # Slot of the input that lies j + 1 tokens back, oldest first; what a row has not seen is zeros.
        back = torch.arange(taps - 1, 0, -1, device=self._device)
        slots = (buffers.seen[:, None] - back) % taps
        conv = buffers.ring.gather(2, slots[None, :, :, None].expand(depth, -1, -1, width))
        conv = torch.where((buffers.seen[:, None] >= back)[None, :, :, None], conv, 0).to(self._dtype)
        recurrent = torch.where((buffers.seen > 0)[None, :, None], buffers.recurrent, 0)
        return ModelState(conv.unbind(0), recurrent.unbind(0), buffers.seen.clone())

    @torch.no_grad()
    def load(self, state: ModelState) -> None:
        """Goes on from a state, such as a prefill's.

        Args:
            state: of B rows of the same model, on its device.

        Raises:
            ValueError: it has another number of rows or blocks, or other widths.
        """
        buffers = self._buffers
        depth, batch, taps, width = buffers.ring.shape
        given = (len(state.conv), state.batch_size, *state.conv[0].shape[1:])
        if given != (depth, batch, taps - 1, width):
            raise ValueError(
                f"state={given} (blocks, rows, taps - 1, width): must be {(depth, batch, taps - 1, width)}"
            )
        buffers.seen.copy_(state.tokens)
        back = torch.arange(taps - 1, 0, -1, device=self._device)
        slots = (buffers.seen[:, None] - back) % taps
        conv = torch.stack(state.conv).float()
        buffers.ring.scatter_(2, slots[None, :, :, None].expand(depth, -1, -1, width), conv)
        buffers.recurrent.copy_(torch.stack(state.recurrent))


# -- weights -----------------------------------------------------------------------------------------------------


def _matrix(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.bfloat16).contiguous()


def _vector(value: Tensor) -> Tensor:
    return value.detach().float().contiguous()


def _samu(mixer: SAMU) -> SAMUWeights:
    """The spectrum worked out in float64 and rounded once, as everywhere."""
    from samu_lm.ops.decode import SAMUWeights

    nu, theta = mixer.nu_log.double().exp(), mixer.theta_log.double().exp()
    gamma = (-torch.expm1(-2 * nu)).sqrt() + 1e-8
    rate = (nu.clamp(max=_MAX_NU) / -torch.log(nu.new_tensor(2.0))).clamp(min=-_MAX_NU)
    directions = torch.stack([mixer.phase_direction, mixer.radial_direction]).float()
    directions = nn.functional.normalize(directions, dim=-1)
    amplitudes = torch.stack([mixer.phase_amplitude, mixer.radial_amplitude]).float()
    scalars = torch.cat([directions[:, -1], (mixer.width // 2) ** -0.5 * amplitudes.tanh()])
    spectrum = torch.stack([rate, theta.cos(), theta.sin(), gamma]).float()
    return SAMUWeights(spectrum, directions[:, :-1].contiguous(), scalars)


def _rglru(mixer: RGLRU) -> RGLRUWeights:
    from samu_lm.ops.decode import RGLRUWeights

    gate, a_gate = mixer.input_gate, mixer.a_gate
    return RGLRUWeights(
        input_weight=_matrix(gate.weight),
        input_bias=_vector(gate.bias).flatten(),
        a_weight=_matrix(a_gate.weight),
        a_bias=_vector(a_gate.bias).flatten(),
        decay=(8 * nn.functional.softplus(mixer.a_param.double())).float(),
    )


def _block(block: RecurrentBlock) -> BlockWeights:
    from samu_lm.ops.decode import BlockWeights, Linear

    def linear(module: nn.Linear) -> Linear:
        return Linear(_matrix(module.weight), module.bias.detach())

    mixer = block.mixer
    return BlockWeights(
        norm=block.norm.scale.detach(),
        linear_y=linear(block.linear_y),
        linear_x=linear(block.linear_x),
        taps=_vector(block.conv.weight.flip(1).t()),
        conv_bias=_vector(block.conv.bias),
        mixer=_samu(mixer) if isinstance(mixer, SAMU) else _rglru(cast(RGLRU, mixer)),
        linear_out=linear(block.linear_out),
        mlp_norm=block.mlp_norm.scale.detach(),
        gate=linear(block.mlp.gate),
        up=linear(block.mlp.up),
        down=linear(block.mlp.down),
    )


def weights_of(model: RecurrentLM) -> Weights:
    """A model's weights as the kernels read them; its bfloat16 matrices are shared."""
    from samu_lm.ops.decode import Weights

    blocks = [_block(cast(RecurrentBlock, block)) for block in model.blocks]
    norm = model.final_norm
    return Weights(_matrix(model.embedding.weight), blocks, norm.scale.detach(), norm.eps)
