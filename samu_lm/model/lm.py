"""Recurrent language model: tied embedding, residual blocks, final norm.

Shapes: B rows, L tokens, D model width, W width of the recurrence, V vocabulary.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from samu_lm.model.block import PIECE, RecurrentBlock, in_pieces
from samu_lm.model.layers import RMSNorm, autocast_dtype, check_backend, is_own
from samu_lm.model.mixers import check_mixer
from samu_lm.model.state import ModelState
from samu_lm.model.stream import Stream

VOCABULARY_MULTIPLE = 64
CHECKPOINTING = ("none", "selective", "block")
_FLOAT32_BYTES = 4


def padded_vocabulary(vocab_size: int) -> int:
    """The multiple of 64 that token ids and logits are padded to: products and memory accesses want one."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size}: must be a whole number of at least 1")


class RecurrentLM(nn.Module):
    """Language model of recurrent residual blocks.

    Args:
        vocab_size: V, number of token ids. The embedding is padded inside to a multiple of 64; padding ids get no
            logit, so they are never sampled and never a target.
        width: D, model width.
        rnn_width: W, width of the recurrence; even for SAMU, divisible by ``num_blocks`` for RG-LRU and by
            ``num_heads`` for the gated delta rule, where it is that of queries, keys and values alike.
        depth: number of residual blocks.
        mixer: ``samu``, ``rglru`` or ``gated_delta``.
        num_blocks: gate blocks of RG-LRU (unused by the others).
        conv_width: taps of the causal convolution.
        mlp_expansion: hidden width of the MLP over D.
        activation_checkpointing: what is worked out again in the backward pass: ``none``; ``selective``, all but the
            recurrences, which are never run twice; or ``block``, everything between the blocks' inputs, for the least
            memory. Batches of many tokens go through gate, output projection and MLP in pieces, and ``block`` then
            keeps the recurrences' outputs, too. The loss is the same, and so are the gradients (``selective`` and
            pieces: within rounding).
        backend: ``auto``, ``reference`` or ``triton`` for the recurrences and convolutions.
        num_heads: heads of the gated delta rule (unused by the others).
        residual_in_float32: keep the stream between the blocks in float32 under autocast, for twice its memory traffic;
            otherwise it has the type of the activations.

    Raises:
        ValueError: a size is not positive or does not suit the mixer; the message names the argument.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        rnn_width: int,
        depth: int,
        mixer: str = "samu",
        num_blocks: int = 16,
        conv_width: int = 4,
        mlp_expansion: int = 3,
        activation_checkpointing: str = "none",
        backend: str = "auto",
        num_heads: int = 8,
        residual_in_float32: bool = False,
    ) -> None:
        super().__init__()
        _check_positive(
            vocab_size=vocab_size,
            width=width,
            rnn_width=rnn_width,
            depth=depth,
            num_blocks=num_blocks,
            conv_width=conv_width,
            mlp_expansion=mlp_expansion,
            num_heads=num_heads,
        )
        check_mixer(mixer, rnn_width, num_blocks, num_heads)  # before any memory is taken
        check_backend(backend)
        if activation_checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"activation_checkpointing={activation_checkpointing}: must be one of {', '.join(CHECKPOINTING)}"
            )
        self.vocab_size, self.width, self.rnn_width, self.depth = vocab_size, width, rnn_width, depth
        self.mixer, self.conv_width = mixer, conv_width
        self.activation_checkpointing = activation_checkpointing
        self.residual_in_float32, self.backend = residual_in_float32, backend
        self.embedding = nn.Embedding(padded_vocabulary(vocab_size), width)
        nn.init.normal_(self.embedding.weight, std=math.sqrt(1 / width))
        self.blocks = nn.ModuleList(
            RecurrentBlock(width, rnn_width, mixer, depth, num_blocks, conv_width, mlp_expansion, backend, num_heads)
            for _ in range(depth)
        )
        self.final_norm = RMSNorm(width)

    # -- the forward pass ----------------------------------------------------------------------------------------

    def hidden(
        self,
        input_ids: Tensor,
        reset: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, ModelState | None]:
        """The final norm's output ``[B, L, D]``, and the new state where asked; arguments as in :meth:`forward`."""
        self._check_inputs(input_ids, reset, state)
        if input_ids.shape[1] == 0:
            return self._no_tokens(input_ids, state, return_state)
        reset = self._mark_empty_states(input_ids, reset, state)
        x = self.embedding(input_ids)
        if not self.residual_in_float32:
            x = x.to(autocast_dtype(x))
        states: list[tuple[Tensor, Tensor]] = []
        again = self.activation_checkpointing if self.training and torch.is_grad_enabled() else "none"
        many = input_ids.numel() > PIECE  # a block's own activations would be too many at once
        for index, block in enumerate(self.blocks):
            # Hooks and wrappers of a block see tensors: a stream goes from one plain block to the next.
            defer = all(is_own(each, RecurrentBlock) for each in self.blocks[index : index + 2])
            if state is not None or return_state:
                before = None if state is None else (state.conv[index], state.recurrent[index])
                x, after = block(x, reset, before, True, defer=defer)
                states.append(after)
            elif again == "block" and not many:
                x = checkpoint(block, x, reset, use_reentrant=False)
            else:
                x = block(x, reset, spare=again, defer=defer)
        x = in_pieces(self._normed, Stream.of(x).added()) if many and again != "none" else self._normed(x)
        if not return_state:
            return x, None
        seen = self._tokens_seen(input_ids, reset, state)
        return x, ModelState(tuple(conv for conv, _ in states), tuple(h for _, h in states), seen)

    @property
    def output_weight(self) -> Tensor:
        """Weight ``[V, D]`` of the output layer: the embedding's, without its padding."""
        return self.embedding.weight[: self.vocab_size]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden states ``[..., D]``, through the tied embedding."""
        return F.linear(hidden, self.output_weight)

    def forward(
        self,
        input_ids: Tensor,
        reset: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """Next-token logits.

        Args:
            input_ids: int64 ``[B, L]``, below V; L may be 0 (an empty prompt).
            reset: bool ``[B, L]``, True at each document's first token.
            state: the rows continue from it; where it is empty, the first token is a first token.
            return_state: return ``(logits, state)``.

        Returns:
            logits ``[B, L, V]`` in the activations' dtype; with the state after the last token when asked.

        Raises:
            TypeError, ValueError: ids, reset or state have the wrong dtype or shape.
        """
        hidden, new_state = self.hidden(input_ids, reset, state, return_state)
        logits = self.logits(hidden)
        return logits if new_state is None else (logits, new_state)

    def compile_parts(self, **options: Any) -> None:
        """Compiles the parts of every block around its recurrence with ``torch.compile(**options)``.

        With activation checkpointing this compiles in seconds and keeps to what is to be worked out again; without, a
        compiled whole is faster.
        """
        for block in self.blocks:
            cast(RecurrentBlock, block).compile_parts(**options)
        normed = torch.compile(type(self)._normed, **options)
        self._normed = MethodType(normed, self)  # type: ignore[method-assign]

    def _normed(self, x: Tensor | Stream) -> Tensor:
        # A norm that the compiler writes itself. torch 2.11's spells out all that an op's arguments come from, when it
        # meets the op for the first time, down to the next code of its own: here the loss's would be the whole model.
        return cast(Tensor, self.final_norm(Stream.of(x).added()))

    # -- recurrent use -------------------------------------------------------------------------------------------

    def init_state(self, batch_size: int) -> ModelState:
        """The empty state of ``batch_size`` rows: its next token is a first token."""
        if batch_size < 0:
            raise ValueError(f"batch_size={batch_size}: must not be negative")
        weight = self.embedding.weight
        conv, recurrent = self._first_block().state_shapes()
        return ModelState(
            tuple(weight.new_zeros(batch_size, *conv) for _ in range(self.depth)),
            tuple(weight.new_zeros(batch_size, *recurrent, dtype=torch.float32) for _ in range(self.depth)),
            torch.zeros(batch_size, dtype=torch.int64, device=weight.device),
        )

    def step(self, token_ids: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """One token per row: ids int64 ``[B]`` to logits ``[B, V]`` and the next state."""
        if token_ids.dim() != 1:
            raise ValueError(f"token_ids.shape={tuple(token_ids.shape)}: must be [batch], one token a row")
        hidden, new_state = self.hidden(token_ids[:, None], None, state, return_state=True)
        assert new_state is not None
        return self.logits(hidden[:, 0]), new_state

    def _check_inputs(self, input_ids: Tensor, reset: Tensor | None, state: ModelState | None) -> None:
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids.shape={tuple(input_ids.shape)}: must be [batch, length]")
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"input_ids.dtype={input_ids.dtype}: must be int64 or int32")
        if reset is not None and (reset.dtype != torch.bool or reset.shape != input_ids.shape):
            raise ValueError(
                f"reset={reset.dtype} {tuple(reset.shape)}: must be torch.bool {tuple(input_ids.shape)}, as input_ids"
            )
        if state is not None and (state.batch_size != input_ids.shape[0] or len(state.recurrent) != self.depth):
            raise ValueError(
                f"state={state.batch_size} rows, {len(state.recurrent)} blocks: "
                f"must have {input_ids.shape[0]} rows and {self.depth} blocks"
            )

    @staticmethod
    def _mark_empty_states(input_ids: Tensor, reset: Tensor | None, state: ModelState | None) -> Tensor | None:
        """Adds a reset to the first token of every row whose state is empty: nothing precedes it."""
        if state is None:
            return reset
        fresh = (state.tokens == 0)[:, None]
        later = torch.zeros_like(input_ids[:, 1:], dtype=torch.bool)
        starts = torch.cat([fresh, later], dim=1)
        return starts if reset is None else reset | starts

    @staticmethod
    def _tokens_seen(input_ids: Tensor, reset: Tensor | None, state: ModelState | None) -> Tensor:
        length = torch.full_like(input_ids[:, 0], input_ids.shape[1], dtype=torch.int64)
        return length if state is None else state.tokens + length

    def _no_tokens(
        self, input_ids: Tensor, state: ModelState | None, return_state: bool
    ) -> tuple[Tensor, ModelState | None]:
        hidden = self.embedding.weight.new_zeros(input_ids.shape[0], 0, self.width)
        if not return_state:
            return hidden, None
        return hidden, self.init_state(input_ids.shape[0]) if state is None else state.clone()

    # -- counts --------------------------------------------------------------------------------------------------

    def _first_block(self) -> RecurrentBlock:
        return cast(RecurrentBlock, self.blocks[0])

    def num_parameters(self, non_embedding: bool = False) -> int:
        """Number of parameters, padding rows of the embedding included; the tied embedding counts once."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total - self.embedding.weight.numel() if non_embedding else total

    def flops_per_token(self, training: bool = True) -> int:
        """Model FLOPs per token in matrix products; a multiply-add is 2, a backward pass twice the forward.

        The recurrences' own arithmetic (:meth:`recurrence_flops_per_token`) and any recomputation are left out, as
        model-FLOPs utilisation wants it.
        """
        block = self._first_block().matmul_flops_per_token()
        forward = self.depth * block + 2 * self.width * self.vocab_size
        return 3 * forward if training else forward

    def recurrence_flops_per_token(self) -> int:
        """Forward FLOPs per token of the recurrences and convolutions, which run outside matrix products."""
        return self.depth * self._first_block().recurrence_flops_per_token()

    def state_bytes(self, batch_size: int = 1, activation_bytes: int = 2) -> int:
        """Bytes of the recurrent state: float32 recurrences, convolution inputs in the activations' dtype."""
        conv, recurrent = self._first_block().state_shapes()
        row = math.prod(recurrent) * _FLOAT32_BYTES + math.prod(conv) * activation_bytes
        return batch_size * self.depth * row

    def decay_parameter_names(self) -> set[str]:
        """Parameters that weight decay may shrink: the matrices (linear maps, gate blocks, embedding).

        Norm scales, biases, convolution taps, RG-LRU's radii, SAMU's spectrum and controls, and the gated delta
        rule's decays are never decayed.
        """
        matrices = {"embedding.weight"}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                matrices.add(f"{name}.weight")
        for name, _ in self.named_parameters():
            if name.endswith(("input_gate.weight", "a_gate.weight")):
                matrices.add(name)
        return matrices
