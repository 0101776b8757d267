"""RG-LRU and the recurrent block against transformers' RecurrentGemma, from copied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samu_lm.model import RGLRU, RecurrentBlock
from samu_lm.ops import reset_from_position_ids
from tests.ops.support import relative_error

modeling = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")

HIDDEN, WIDTH, HEADS = 48, 64, 4


def _config() -> object:
    from transformers import RecurrentGemmaConfig

    return RecurrentGemmaConfig(
        num_hidden_layers=1,
        hidden_size=HIDDEN,
        lru_width=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=2 * 3 * HIDDEN,
        conv1d_width=4,
        hidden_activation="gelu_pytorch_tanh",
        block_types=["recurrent"],
    )


def _copy_mixer(mixer: RGLRU, oracle: nn.Module) -> dict[str, str]:
    """Fills the oracle from ours; returns our name for each of its parameters."""
    names = {
        "recurrent_param": "a_param",
        "input_gate_weight": "input_gate.weight",
        "input_gate_bias": "input_gate.bias",
        "recurrent_gate_weight": "a_gate.weight",
        "recurrent_gate_bias": "a_gate.bias",
    }
    ours = dict(mixer.named_parameters())
    assert set(names) == dict(oracle.named_parameters()).keys()
    with torch.no_grad():
        for theirs, own in names.items():
            ours[own].add_(0.1 * torch.randn_like(ours[own]))  # biases too must differ from 0
            oracle.get_parameter(theirs).copy_(ours[own])
    return names


def test_mixer_on_packed_positions() -> None:
    mixer, oracle = RGLRU(WIDTH, HEADS), modeling.RecurrentGemmaRglru(_config())
    names = _copy_mixer(mixer, oracle)
    positions = torch.cat([torch.arange(n) for n in (5, 1, 1, 2, 30, 3, 22)])[None].repeat(2, 1)
    positions[1] = torch.arange(64)
    x = torch.randn(2, 64, WIDTH)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = mixer(ours, reset_from_position_ids(positions)), oracle(theirs, positions)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    assert relative_error(y, expected) < 2e-6
    assert relative_error(ours.grad, theirs.grad) < 1e-5
    own = dict(mixer.named_parameters())
    for theirs_name, own_name in names.items():
        assert relative_error(own[own_name].grad, oracle.get_parameter(theirs_name).grad) < 2e-5, own_name


def test_whole_block_on_single_documents() -> None:
    """Their convolution ignores positions, so each row here is one document."""
    block = RecurrentBlock(HIDDEN, WIDTH, "rglru", num_blocks=HEADS)
    oracle = modeling.RecurrentGemmaDecoderLayer(_config(), 0)
    _copy_mixer(block.mixer, oracle.temporal_block.rg_lru)
    pairs = {
        "temporal_pre_norm.weight": "norm.scale",
        "channel_pre_norm.weight": "mlp_norm.scale",
        "temporal_block.conv_1d.weight": "conv.weight",
        "temporal_block.conv_1d.bias": "conv.bias",
        **{
            f"temporal_block.{n}.{p}": f"{n}.{p}"
            for n in ("linear_x", "linear_y", "linear_out")
            for p in ("weight", "bias")
        },
        **{f"mlp_block.{n}_proj.{p}": f"mlp.{n}.{p}" for n in ("gate", "up", "down") for p in ("weight", "bias")},
    }
    rest = {n for n, _ in oracle.named_parameters() if "rg_lru" not in n}
    assert set(pairs) == rest
    own = dict(block.named_parameters())
    with torch.no_grad():
        for theirs, ours in pairs.items():
            own[ours].add_(0.1 * torch.randn_like(own[ours]))
            parameter = oracle.get_parameter(theirs)
            parameter.copy_(own[ours].view_as(parameter))
    x = torch.randn(3, 37, HIDDEN)
    positions = torch.arange(37)[None].repeat(3, 1)
    result = oracle(x, position_ids=positions, attention_mask=None, use_cache=False)
    expected = result[0] if isinstance(result, tuple) else result
    y = block(x)
    assert relative_error(y, expected) < 2e-6
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    for theirs, ours in pairs.items():
        grad = oracle.get_parameter(theirs).grad
        assert relative_error(own[ours].grad.view_as(grad), grad) < 2e-5, ours
