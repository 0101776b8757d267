"""One token for every row: the order of the launches, five a block.

Letters: B rows, D model width, W width of the recurrence, K taps, E hidden width of the MLP, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.decode.kernel_linear import logits_kernel, paired_kernel, residual_kernel
from samu_lm.ops.decode.kernel_mixer import rglru_kernel, samu_kernel
from samu_lm.ops.decode.kernel_token import choose_kernel, embed_kernel
from samu_lm.ops.decode.plan import Plan, Split


class Linear(NamedTuple):
    """Weight bfloat16 ``[outputs, inputs]``, bias ``[outputs]`` of any floating type."""

    weight: Tensor
    bias: Tensor


class SAMUWeights(NamedTuple):
    """float32: spectrum ``[4, M]``, directions ``[2, W]``, scalars ``[4]``, as ``samu_kernel`` reads them."""

    spectrum: Tensor
    directions: Tensor
    scalars: Tensor


class RGLRUWeights(NamedTuple):
    """Gate weights bfloat16 ``[H, w, w]``; biases and decay float32 ``[W]``, as ``rglru_kernel`` reads them."""

    input_weight: Tensor
    input_bias: Tensor
    a_weight: Tensor
    a_bias: Tensor
    decay: Tensor


class BlockWeights(NamedTuple):
    """A block: norm scales ``[D]``; convolution float32, row k of taps ``[K, W]`` for the input k tokens back."""

    norm: Tensor
    linear_y: Linear
    linear_x: Linear
    taps: Tensor
    conv_bias: Tensor
    mixer: SAMUWeights | RGLRUWeights
    linear_out: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Weights(NamedTuple):
    """A model: embedding bfloat16, at least V rows of D; the final norm's scale ``[D]``."""

    embedding: Tensor
    blocks: list[BlockWeights]
    final_norm: Tensor
    eps: float


class Buffers(NamedTuple):
    """What a token is worked out in, at fixed addresses. float32 unless said otherwise.

    ring ``[depth, B, K, W]`` and recurrent ``[depth, B, W]`` are the state; tokens int64 ``[B]``, the ids to read and
    then the ids chosen; seen int64 ``[B]``, tokens seen so far; x ``[B, D]``, the residual stream; gate ``[B, W]``;
    in the activations' dtype scaled ``[B, D]``, mixed ``[B, W]``, hidden ``[B, E]``; sums of squares of x, before a
    block and inside it, outer and inner ``[B, programs]``; logits ``[B, V]``; best and best_id (int32)
    ``[B, programs]``.
    """

    tokens: Tensor
    seen: Tensor
    ring: Tensor
    recurrent: Tensor
    x: Tensor
    gate: Tensor
    scaled: Tensor
    mixed: Tensor
    hidden: Tensor
    outer: Tensor
    inner: Tensor
    logits: Tensor
    best: Tensor
    best_id: Tensor


def make_buffers(
    weights: Weights, batch: int, vocabulary: int, plan: Plan, activations: torch.dtype = torch.bfloat16
) -> Buffers:
    """Buffers of ``batch`` rows with an empty state, on the weights' device."""
    device = weights.embedding.device
    block = weights.blocks[0]
    taps, channels = block.taps.shape
    width = weights.embedding.shape[1]

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    programs = cdiv(vocabulary, plan.logits.size)
    return Buffers(
        tokens=zeros(batch, dtype=torch.int64),
        seen=zeros(batch, dtype=torch.int64),
        ring=zeros(len(weights.blocks), batch, taps, channels),
        recurrent=zeros(len(weights.blocks), batch, channels),
        x=zeros(batch, width),
        gate=zeros(batch, channels),
        scaled=zeros(batch, width, dtype=activations),
        mixed=zeros(batch, channels, dtype=activations),
        hidden=zeros(batch, block.gate.weight.shape[0], dtype=activations),
        outer=zeros(batch, cdiv(width, plan.mlp_output.size)),
        inner=zeros(batch, cdiv(width, plan.output.size)),
        logits=zeros(batch, vocabulary),
        best=zeros(batch, programs),
        best_id=zeros(batch, programs, dtype=torch.int32),
    )


def _paired(
    squares: Tensor, first: Linear, second: Linear, out: Tensor, ring: Tensor | None, buffers: Buffers, eps: float,
    split: Split, overlap: dict[str, bool],
) -> None:  # fmt: skip
    outputs, inputs = first.weight.shape
    launch(
        paired_kernel,
        cdiv(outputs, split.size),
        buffers.scaled,
        squares,
        *first,
        *second,
        out,
        out if ring is None else ring,
        buffers.seen,
        B=buffers.tokens.shape[0],
        N=outputs,
        K=inputs,
        PARTS=squares.shape[1],
        TAPS=1 if ring is None else ring.shape[1],
        MULTIPLY=ring is None,
        EPS=eps,
        **split.pieces(inputs),
        **overlap,
    )


def _residual(
    v: Tensor, linear: Linear, scale: Tensor, squares: Tensor, buffers: Buffers, split: Split, overlap: dict[str, bool]
) -> None:
    outputs, inputs = linear.weight.shape
    launch(
        residual_kernel,
        cdiv(outputs, split.size),
        v,
        *linear,
        scale,
        buffers.x,
        buffers.scaled,
        squares,
        B=buffers.tokens.shape[0],
        N=outputs,
        K=inputs,
        PARTS=squares.shape[1],
        **split.pieces(inputs),
        **overlap,
    )


def _mix(block: BlockWeights, buffers: Buffers, index: int, plan: Plan, overlap: dict[str, bool]) -> None:
    ring, state = buffers.ring[index], buffers.recurrent[index]
    batch, taps, width = ring.shape
    before = (ring, buffers.seen, block.taps, block.conv_bias, *block.mixer)
    after = (buffers.gate, state, buffers.mixed)
    if isinstance(block.mixer, SAMUWeights):
        parts = cdiv(width // 2, plan.samu.size)
        launch(
            samu_kernel,
            batch * parts,
            *before,
            *after,
            W=width,
            TAPS=taps,
            PARTS=parts,
            BLOCK=plan.samu.size,
            WHOLE=next_power_of_two(width),
            num_warps=plan.samu.warps,
            **overlap,
        )
        return
    blocks, block_width, _ = block.mixer.input_weight.shape
    columns = min(plan.rglru.size, next_power_of_two(block_width))
    parts = cdiv(block_width, columns)
    launch(
        rglru_kernel,
        batch * blocks * parts,
        *before,
        *after,
        W=width,
        BLOCK_WIDTH=block_width,
        TAPS=taps,
        PARTS=parts,
        COLUMNS=columns,
        INPUTS=next_power_of_two(block_width),
        num_warps=plan.rglru.warps,
        **overlap,
    )


def decode_token(weights: Weights, buffers: Buffers, plan: Plan, overlaps: bool) -> None:
    """Reads ``tokens``; moves the state on; writes ``logits``, and to ``tokens`` the ids of the largest.

    Args:
        weights: of a model.
        buffers: of :func:`make_buffers`, with the same plan.
        plan: how the kernels are cut up.
        overlaps: the device can start a kernel before the last one has ended (compute capability 9.0 and later).
    """
    overlap = {"OVERLAP": plan.overlap and overlaps}
    if overlap["OVERLAP"]:
        overlap["launch_pdl"] = True
    batch, width = buffers.x.shape
    vocabulary, programs = buffers.logits.shape[1], buffers.best.shape[1]
    blocks, outer = weights.blocks, buffers.outer
    launch(
        embed_kernel,
        batch,
        buffers.tokens,
        weights.embedding,
        blocks[0].norm,
        buffers.x,
        buffers.scaled,
        outer,
        D=width,
        BLOCK=next_power_of_two(width),
        PARTS=outer.shape[1],
        PART_BLOCK=next_power_of_two(outer.shape[1]),
        OVERLAP=overlap["OVERLAP"],
        num_warps=4,
    )
    following = [block.norm for block in blocks[1:]] + [weights.final_norm]
    for index, (block, next_norm) in enumerate(zip(blocks, following, strict=True)):
        projections = (block.linear_y, block.linear_x)
        _paired(outer, *projections, buffers.gate, buffers.ring[index], buffers, weights.eps, plan.input, overlap)
        _mix(block, buffers, index, plan, overlap)
        _residual(buffers.mixed, block.linear_out, block.mlp_norm, buffers.inner, buffers, plan.output, overlap)
        mlp = (block.gate, block.up)
        _paired(buffers.inner, *mlp, buffers.hidden, None, buffers, weights.eps, plan.mlp_input, overlap)
        _residual(buffers.hidden, block.down, next_norm, outer, buffers, plan.mlp_output, overlap)
    launch(
        logits_kernel,
        programs,
        buffers.scaled,
        outer,
        weights.embedding,
        buffers.logits,
        buffers.best,
        buffers.best_id,
        B=batch,
        N=vocabulary,
        K=width,
        PROGRAMS=programs,
        PARTS=outer.shape[1],
        EPS=weights.eps,
        **plan.logits.pieces(width),
        **overlap,
    )
    launch(
        choose_kernel,
        batch,
        buffers.best,
        buffers.best_id,
        buffers.tokens,
        buffers.seen,
        V=vocabulary,
        PARTS=programs,
        BLOCK=next_power_of_two(programs),
        num_warps=8,
        **overlap,
    )
