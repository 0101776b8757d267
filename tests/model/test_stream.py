"""A model whose additions and norms are one op: what plain PyTorch gives, with fewer passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import lowering

from samu_lm.model import RecurrentLM
from samu_lm.model.layers import RMSNorm
from samu_lm.model.stream import Stream
from samu_lm.ops.backend import interpreting
from samu_lm.ops.common.launch import count_launches
from samu_lm.training.loss import packed_nll, summed_cross_entropy
from tests.ops.support import random_reset, relative_error

pytestmark = pytest.mark.skipif(not interpreting(), reason="CUDA kernels read no CPU tensors")

MIXERS = ("samu", "rglru", "gated_delta")
by_mixer = pytest.mark.parametrize("mixer", MIXERS)
DEPTH = 2


def build(mixer: str, backend: str, depth: int = DEPTH, **settings: Any) -> RecurrentLM:
    torch.manual_seed(0)
    model = RecurrentLM(50, 8, 16, depth, mixer, num_blocks=2, num_heads=2, backend=backend, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "scale")):
            nn.init.normal_(parameter, std=0.3)
    return model


def results(model: RecurrentLM, ids: torch.Tensor, reset: torch.Tensor) -> list[torch.Tensor]:
    logits = model(ids, reset)
    return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]


@by_mixer
@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
def test_kernels_give_what_the_reference_gives(mixer: str, checkpointing: str) -> None:
    ids, reset = torch.randint(0, 50, (2, 20)), random_reset(2, 20)
    truth = results(build(mixer, "reference").double(), ids, reset)
    model = build(mixer, "triton", activation_checkpointing=checkpointing)
    for value, true in zip(results(model, ids, reset), truth, strict=True):
        assert relative_error(value, true) < 1e-4


@by_mixer
def test_every_addition_waits_for_the_norm_behind_it(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first norm, with nothing to add before it, and the last are the modules'."""
    norms: list[nn.Module] = []
    forward = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: norms.append(self) or forward(self, x))
    model = build(mixer, "triton")
    with count_launches() as names:
        model(torch.randint(0, 50, (1, 8)))
    assert Counter(names)["residual_norm_kernel"] == 2 * DEPTH - 1
    assert Counter(names)["gelu_kernel"] == DEPTH * (1 if mixer == "gated_delta" else 2)
    ours = [norm for block in model.blocks for norm in (block.norm, block.mlp_norm)]
    assert [norm for norm in norms if norm in ours or norm is model.final_norm] == [ours[0], model.final_norm]


@by_mixer
def test_states_and_the_whole_agree(mixer: str) -> None:
    model, ids = build(mixer, "triton").eval(), torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        whole = model(ids)
        before, state = model(ids[:, :5], return_state=True)
        after, state = model(ids[:, 5:8], state=state, return_state=True)
        last, _ = model.step(ids[:, 8], state)
    torch.testing.assert_close(torch.cat([before, after, last[:, None]], 1), whole, atol=1e-4, rtol=1e-4)


def test_a_block_alone_gives_a_tensor() -> None:
    x = torch.randn(1, 6, 8)
    kernels, plain = build("samu", "triton").blocks[0], build("samu", "reference").blocks[0]
    out = kernels(x)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, plain(x), atol=1e-5, rtol=1e-4)
    waiting = kernels(x, defer=True)
    assert isinstance(waiting, Stream)
    torch.testing.assert_close(waiting.added(), out)


def test_a_listener_hears_every_product() -> None:
    block, heard = build("samu", "triton").blocks[0], []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: heard.append(name))
    block(torch.randn(1, 6, 8))
    assert sorted(heard) == ["linear_out", "linear_x", "linear_y", "mlp.down", "mlp.gate", "mlp.up"]


def test_a_listener_hears_backward_passes_and_norms() -> None:
    model, heard = build("samu", "triton"), []
    inner = (nn.Linear, RMSNorm)
    names = [name for name, module in model.named_modules() if isinstance(module, inner)]
    for name in names:
        model.get_submodule(name).register_full_backward_hook(lambda *_, name=name: heard.append(name))
    model(torch.randint(0, 50, (1, 6))).sum().backward()
    assert sorted(heard) == sorted(names)


def test_what_replaces_a_norm_or_a_product_is_used() -> None:
    class Doubled(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    ids, found = torch.randint(0, 50, (1, 6)), []
    for backend in ("reference", "triton"):
        model = build("samu", backend)
        first, second = model.blocks
        first.mlp_norm, second.norm = Doubled(8), nn.LayerNorm(8)
        plain = first.linear_out.forward
        first.linear_out.forward = lambda x, plain=plain: plain(x) + 1
        for name in ("gate", "up"):
            setattr(second.mlp, name, nn.Linear(8, 24, bias=False))
            nn.init.constant_(getattr(second.mlp, name).weight, 0.1)
        found.append(model(ids))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
@pytest.mark.parametrize("wide", [False, True])
def test_the_stream_keeps_its_type_under_autocast(checkpointing: str, wide: bool) -> None:
    model = build("samu", "triton", activation_checkpointing=checkpointing, residual_in_float32=wide)
    types: list[torch.dtype] = []
    normed = model._normed
    model._normed = lambda x: types.append(Stream.of(x).added().dtype) or normed(x)
    dtype = torch.float32 if wide else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model.hidden(torch.randint(0, 50, (1, 6)))
        out = model.blocks[0](torch.randn(1, 6, 8).to(dtype))
    assert [*types, hidden.dtype, out.dtype] == [dtype] * 3


@pytest.mark.parametrize("checkpointing", ["selective", "block"])
def test_states_of_many_tokens_in_training(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samu_lm.model.lm.PIECE", 4)
    ids = torch.randint(0, 50, (1, 6))
    model = build("samu", "triton", activation_checkpointing=checkpointing)
    logits, _ = model(ids, return_state=True)
    torch.testing.assert_close(logits, build("samu", "reference")(ids), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
def test_one_graph(mixer: str) -> None:
    model, ids, reset = build(mixer, "triton"), torch.randint(0, 50, (1, 8)), random_reset(1, 8)
    eager = results(model, ids, reset)
    compiled = torch.compile(lambda ids, reset: model(ids, reset), backend="aot_eager", fullgraph=True)
    logits = compiled(ids, reset)
    found = [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]
    for value, true in zip(found, eager, strict=True):
        torch.testing.assert_close(value, true, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_compiler_can_spell_out_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 does, for each op that it meets for the first time; where ops alone feed ops it takes years."""
    lengths: dict[str, int] = {}

    def spell(function: Any, *args: Any) -> str:
        text = function(*args)
        if args:
            lengths[str(args[0])] = len(text)
        return str(text)

    monkeypatch.setattr("torch._inductor.graph.LazyString", spell)
    monkeypatch.setattr("samu_lm.training.loss.MOST_CHUNKS", 2)
    monkeypatch.setattr(summed_cross_entropy, "__defaults__", (1, "auto"))
    for op in [op for op in lowering.lowerings if str(op).startswith("samu_lm")]:
        monkeypatch.delitem(lowering.lowerings, op)  # as where no test before this one has compiled it
    model, ids, reset = build("samu", "triton", depth=3), torch.randint(0, 50, (2, 16)), random_reset(2, 16)
    compiled = torch.compile(packed_nll, dynamic=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(model, ids, ids, reset, torch.ones_like(reset)).backward()
    ours = {name: length for name, length in lengths.items() if name.startswith("samu_lm")}
    if not ours and torch.__version__ < "2.12":
        pytest.skip("it does so by itself, and comes to an end")
    assert 0 < max(ours.values()) < 1_000_000, ours


@pytest.mark.parametrize("place", [0, 1])
def test_hooks_of_a_block_see_tensors(place: int) -> None:
    """What a hook returns is what goes on, as where nothing waits for the next norm."""
    ids, outputs = torch.randint(0, 50, (2, 12)), []
    seen: list[Any] = []
    for backend in ("triton", "reference"):
        model = build("samu", backend)
        model.blocks[place].register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        model.blocks[place].register_forward_hook(
            lambda *call: 2 * (call[-1][0] if isinstance(call[-1], tuple) else call[-1])
        )
        outputs.append(model(ids))
    assert [type(x) for x in seen] == [torch.Tensor] * 2
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
