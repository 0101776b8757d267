"""The language model: packing, state, checkpointing, compile, and what it refuses."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.model import ModelState, RecurrentLM
from samu_lm.model.block import MLP
from samu_lm.ops.common.launch import count_launches
from tests.ops.support import random_reset, relative_error, reset_of_lengths

by_mixer = pytest.mark.parametrize("mixer", ["samu", "rglru", "gated_delta"])


def _model(mixer: str, **kwargs: Any) -> RecurrentLM:
    model = RecurrentLM(70, 16, 32, 2, mixer, **kwargs)
    with torch.no_grad():  # controls at work, convolution loud enough that a leak would show
        for name, parameter in model.named_parameters():
            if "_amplitude" in name:
                parameter.fill_(1.0)
            if ".conv.weight" in name:
                parameter.normal_()
    return model


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 70, (batch, length))


@by_mixer
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_packed_equals_alone(mixer: str, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    model, ids = _model(mixer), _ids(1, sum(lengths))
    packed = model(ids, reset_of_lengths(lengths))
    weight = torch.randn_like(packed)
    (packed * weight).sum().backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    start = 0
    for length in lengths:
        alone = model(ids[:, start : start + length])
        assert relative_error(packed[:, start : start + length], alone) < 1e-5
        (alone * weight[:, start : start + length]).sum().backward()
        start += length
    for name, parameter in model.named_parameters():
        if name in together:
            assert parameter.grad is not None
            # A head's norm amplifies the rounding of outputs close to 0, as first tokens may have.
            bound = 1e-3 if mixer == "gated_delta" else 1e-4
            assert (together[name] - parameter.grad).abs().max() < bound * (1 + parameter.grad.abs().max()), name


@by_mixer
@pytest.mark.parametrize("boundary", [1, 31, 32, 33])
def test_a_change_in_one_document_reaches_no_bit_of_the_next(mixer: str, boundary: int) -> None:
    """Row [A|B], A's last token changed: B's logits keep every bit, B's loss has exactly no gradient in A."""
    model, ids = _model(mixer), _ids(1, 64)
    reset = reset_of_lengths([boundary, 64 - boundary])
    changed = ids.clone()
    changed[0, boundary - 1] = (ids[0, boundary - 1] + 1) % 70
    before, after = model(ids, reset), model(changed, reset)
    assert torch.equal(before[:, boundary:], after[:, boundary:])
    assert not torch.equal(before[:, boundary - 1], after[:, boundary - 1])
    embedded: list[torch.Tensor] = []
    handle = model.embedding.register_forward_hook(lambda _m, _i, out: embedded.append(out))
    loss = model(ids, reset)[:, boundary:].square().sum()
    handle.remove()
    grad = torch.autograd.grad(loss, embedded[0])[0]
    assert not grad[:, :boundary].any()
    assert grad[:, boundary:].any()


@by_mixer
@pytest.mark.parametrize("inert", ["conv", "mixer"])
def test_each_part_isolates_by_itself(mixer: str, inert: str) -> None:
    """With the convolution reduced to its current token the recurrence alone isolates, and the other way round."""
    model = _model(mixer)
    for block in model.blocks:
        if inert == "conv":
            conv = block.mixer.conv if mixer == "gated_delta" else block.conv
            with torch.no_grad():
                conv.weight[:, :3] = 0
        elif mixer == "gated_delta":
            block.mixer.recur = lambda q, k, v, *_: (v, None)
        else:
            block.mixer.mix = lambda x, reset, state, return_state: (x, None)
    ids = _ids(1, 40)
    changed = ids.clone()
    changed[0, 19] = (ids[0, 19] + 1) % 70
    reset = reset_of_lengths([20, 20])
    assert torch.equal(model(ids, reset)[:, 20:], model(changed, reset)[:, 20:])
    assert not torch.equal(model(ids)[:, 20:23], model(changed)[:, 20:23]), "without the reset it must leak"


@by_mixer
@pytest.mark.parametrize("prompt", [0, 1, 3, 31, 64, 300])
def test_prefill_steps_and_the_parallel_pass_agree(mixer: str, prompt: int) -> None:
    model, ids, reset = _model(mixer).eval(), _ids(2, 300), random_reset(2, 300, 0.02)
    with torch.no_grad():
        whole, end = model(ids, reset, return_state=True)
        head, state = model(ids[:, :prompt], reset[:, :prompt], return_state=True)
        tail, final = model(ids[:, prompt:], reset[:, prompt:], state, return_state=True)
        assert relative_error(torch.cat([head, tail], 1), whole) < 1e-5
        for one, other in zip((*final.conv, *final.recurrent), (*end.conv, *end.recurrent), strict=True):
            assert relative_error(one, other) < 1e-5
        assert final.tokens.tolist() == [300, 300]
        if prompt <= 64:
            plain = model(ids[:, :80])
            head, state = model(ids[:, :prompt], state=model.init_state(2), return_state=True)
            logits = [head]
            for t in range(prompt, 80):
                step, state = model.step(ids[:, t], state)
                logits.append(step[:, None])
            assert relative_error(torch.cat(logits, 1), plain) < 1e-5


@by_mixer
def test_state_is_saved_loaded_and_branched(mixer: str) -> None:
    model, ids = _model(mixer).eval(), _ids(1, 20)
    with torch.no_grad():
        _, state = model(ids, return_state=True)
        buffer = io.BytesIO()
        torch.save(state.state_dict(), buffer)
        buffer.seek(0)
        loaded = ModelState.from_state_dict(torch.load(buffer, weights_only=True))
        branched = loaded.select(torch.tensor([0, 0, 0]))
        tokens = torch.tensor([1, 2, 1])
        logits, after = model.step(tokens, branched)
        alone, _ = model.step(tokens[:1], state.clone())
    torch.testing.assert_close(logits[0], logits[2])
    torch.testing.assert_close(logits[:1], alone)
    assert not torch.allclose(logits[0], logits[1])
    assert branched.tokens.tolist() == [20] * 3
    assert after.tokens.tolist() == [21] * 3
    with pytest.raises(ValueError, match="state keys"):
        ModelState.from_state_dict({"conv": []})


@by_mixer
def test_rows_of_unequal_history(mixer: str) -> None:
    """An empty row beside a running one: its next token is a first token, the other's is not."""
    model, ids = _model(mixer).eval(), _ids(1, 12)
    with torch.no_grad():
        _, running = model(ids[:, :11], return_state=True)
        empty = model.init_state(1)
        both = ModelState.from_state_dict(
            {
                "conv": [torch.cat(p) for p in zip(running.conv, empty.conv, strict=True)],
                "recurrent": [torch.cat(p) for p in zip(running.recurrent, empty.recurrent, strict=True)],
                "tokens": torch.cat([running.tokens, empty.tokens]),
            }
        )
        logits, _ = model.step(ids[0, 11:].repeat(2), both)
        torch.testing.assert_close(logits[:1], model(ids)[:, -1], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(logits[1:], model(ids[:, 11:])[:, -1], atol=2e-5, rtol=1e-5)


@by_mixer
def test_a_deep_copy_of_a_model_compiled_by_parts_has_its_own_weights(mixer: str) -> None:
    torch._dynamo.reset()
    model = _model(mixer).eval()
    model.compile_parts(backend="aot_eager")
    other = copy.deepcopy(model)
    plain = _model(mixer).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        plain.load_state_dict(other.state_dict())
        ids = torch.arange(10)[None]
        torch.testing.assert_close(other(ids), plain(ids))


def test_unknown_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing=all: must be one of none, selective, block"):
        _model("samu", activation_checkpointing="all")


@by_mixer
def test_compiled_model_matches(mixer: str) -> None:
    """One graph without a break; the keys of a model compiled in place stay as they were."""
    model = _model(mixer)
    keys = list(model.state_dict())
    ids, reset = _ids(2, 24), random_reset(2, 24)
    plain = model(ids, reset)
    plain.square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.compile(fullgraph=True, backend="aot_eager")
    assert list(model.state_dict()) == keys
    fast = model(ids, reset)
    fast.square().sum().backward()
    assert relative_error(fast, plain) < 1e-5
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= 1e-4 * (1 + expected[name].abs().max()), name


def test_padding_ids_have_no_logits() -> None:
    model = RecurrentLM(70, 16, 32, 1)
    assert model.embedding.weight.shape == (128, 16)
    assert model(_ids(1, 3)).shape == (1, 3, 70)


@pytest.mark.parametrize("wide", [False, True])
def test_the_stream_between_blocks_has_the_type_of_the_activations_or_float32(wide: bool) -> None:
    model = _model("samu", residual_in_float32=wide)
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(_ids(1, 9)).float().sum().backward()
    assert seen == [torch.float32 if wide else torch.bfloat16] * len(model.blocks)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("plain", [True, False], ids=["joined", "another kind of linear map"])
def test_gate_and_up_as_one_product_are_the_same_function(plain: bool) -> None:
    """On kernels the two projections are one; a map of another kind (float8) keeps its own product."""
    torch.manual_seed(0)
    mlp, joined = MLP(8, 3, 2, "reference"), MLP(8, 3, 2, "triton")
    joined.load_state_dict(mlp.state_dict())
    if not plain:
        joined.gate.__class__ = type("Other", (torch.nn.Linear,), {})
    x = torch.randn(2, 5, 8)
    results = []
    for module in (mlp, joined):
        leaf = x.clone().requires_grad_()
        with count_launches() as names:
            y = module(leaf)
            y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in module.parameters())])
    assert ("gelu_gradients_kernel" in names) == plain
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad(), count_launches() as names:
        torch.testing.assert_close(joined(x), mlp(x))
    assert names == []


@by_mixer
def test_autocast_keeps_the_carry_in_float32(mixer: str) -> None:
    model = _model(mixer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, state = model(_ids(1, 9), return_state=True)
    assert logits.dtype == torch.bfloat16
    assert all(h.dtype == torch.float32 for h in state.recurrent)
    assert relative_error(logits.float(), model(_ids(1, 9))) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rnn_width": 33}, r"rnn_width=33: SAMU needs an even width"),
        ({"mixer": "rglru", "rnn_width": 40}, r"rnn_width=40: must be divisible by num_blocks=16; try 32"),
        ({"mixer": "gated_delta", "num_heads": 5}, r"rnn_width=32: must be divisible by num_heads=5; try 30"),
        ({"mixer": "gated_delta", "num_heads": 0}, r"num_heads=0: must be a whole number"),
        ({"mixer": "mamba"}, r"mixer='mamba': must be one of samu, rglru, gated_delta"),
        ({"depth": 0}, r"depth=0: must be a whole number"),
        ({"vocab_size": -1}, r"vocab_size=-1"),
        ({"width": 1.5}, r"width=1\.5"),
        ({"backend": "gpu"}, r"backend='gpu'"),
    ],
)
def test_bad_sizes(change: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 70, "width": 16, "rnn_width": 32, "depth": 1}
    with pytest.raises(ValueError, match=message):
        RecurrentLM(**{**sizes, **change})


def test_bad_inputs() -> None:
    model = RecurrentLM(70, 16, 32, 2)
    with pytest.raises(ValueError, match=r"input_ids\.shape=\(3,\)"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"input_ids\.dtype=torch\.float32"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="reset="):
        model(_ids(1, 3), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="state=2 rows"):
        model(_ids(1, 3), state=model.init_state(2))
    with pytest.raises(ValueError, match=r"token_ids\.shape"):
        model.step(_ids(1, 3), model.init_state(1))
