"""The decoder's kernels, interpreted, are ``model.step``: logits, states and the ids chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samu_lm.model import Decoder, ModelState, RecurrentLM
from samu_lm.model.decoder import weights_of, why_not
from samu_lm.ops.backend import interpreting
from samu_lm.ops.decode import Plan

pytestmark = pytest.mark.skipif(not interpreting(), reason="CUDA kernels read no CPU tensors; tests/gpu has the same")

# Few programs: the interpreter takes milliseconds for each.
LARGE = Plan().changed(
    {name: [32, 4, 32] for name in ("input", "output", "mlp_input", "mlp_output")}
    | {"logits": [64, 4], "samu": [32, 4], "rglru": [16, 4]}
)
# Sizes that no split divides, several programs for each kernel, pieces of a matrix that are whole and cut.
SMALL = Plan().changed(
    {"input": [32, 4, 16], "output": [16, 1, 0, 2], "mlp_input": [64, 4, 64, 2], "mlp_output": [16, 2, 32, 4]}
    | {"logits": [32, 4, 16, 4], "samu": [16, 1], "rglru": [4, 1]}
)
ODD = {"vocab_size": 70, "width": 28, "rnn_width": 80, "depth": 2, "conv_width": 3}
EVEN = {"vocab_size": 100, "width": 32, "rnn_width": 64, "depth": 2}


def build(mixer: str, **sizes: int) -> RecurrentLM:
    """A model whose every parameter matters, and whose matrices are bfloat16 numbers."""
    model = RecurrentLM(**sizes, mixer=mixer).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                parameter.fill_(0.7)
            elif name.endswith(("bias", "scale")):
                parameter.normal_(std=0.3)
            parameter.copy_(parameter.bfloat16())
    return model


def difference(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def agree(decoder: Decoder, model: RecurrentLM, state: ModelState, tokens: int) -> ModelState:
    """Decodes the same ids with both, the first of them given and then those chosen."""
    ids = torch.randint(0, model.vocab_size, (decoder.batch_size,))
    decoder.tokens.copy_(ids)
    for _ in range(tokens):
        with torch.no_grad():
            logits, state = model.step(ids, state)
        decoder.advance()
        assert difference(decoder.last_logits, logits) < 3e-6
        ids = logits.argmax(-1)
        assert decoder.tokens.tolist() == ids.tolist()
    return state


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
@pytest.mark.parametrize(
    ("sizes", "batch", "plan"), [(EVEN, 1, LARGE), (ODD, 3, SMALL)], ids=["one row", "odd sizes, three rows"]
)
def test_step(mixer: str, sizes: dict[str, int], batch: int, plan: Plan) -> None:
    model = build(mixer, **sizes)
    decoder = Decoder(model, batch, plan, torch.float32)
    state = agree(decoder, model, model.init_state(batch), 5)
    own = decoder.state
    assert own.tokens.tolist() == state.tokens.tolist() == [5] * batch
    for mine, truth in zip(own.conv + own.recurrent, state.conv + state.recurrent, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
def test_goes_on_from_a_prefill(mixer: str) -> None:
    """Rows that have seen 0, 2 and 6 tokens, the last with a reset inside: what is stale is not read."""
    model = build(mixer, **EVEN)
    prompts = torch.randint(0, 100, (1, 6))
    reset = torch.tensor([[False, False, False, False, True, False]])
    with torch.no_grad():
        empty = model.init_state(1)
        _, short = model(prompts[:, :2], state=empty, return_state=True)
        _, long = model(prompts, reset, empty, return_state=True)
    stale = empty.map(lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t)
    rows = [stale, short, long]
    state = ModelState(
        tuple(torch.cat(parts) for parts in zip(*(row.conv for row in rows), strict=True)),
        tuple(torch.cat(parts) for parts in zip(*(row.recurrent for row in rows), strict=True)),
        torch.cat([row.tokens for row in rows]),
    )
    decoder = Decoder(model, 3, LARGE, torch.float32)
    decoder.load(state)
    loaded = decoder.state
    for mine, truth in zip(loaded.conv + loaded.recurrent, state.conv + state.recurrent, strict=True):
        assert torch.equal(mine[1:], truth[1:])
        assert not mine[0].any()
    after = agree(decoder, model, state, 3)
    assert decoder.state.tokens.tolist() == after.tokens.tolist() == [3, 5, 9]
    decoder.reset()
    agree(decoder, model, model.init_state(3), 2)


def test_given_tokens() -> None:
    model = build("samu", **EVEN)
    decoder = Decoder(model, 1, LARGE, torch.float32)
    ids = torch.tensor([7])
    with torch.no_grad():
        logits, _ = model.step(ids, model.init_state(1))
    assert difference(decoder.logits(ids), logits) < 3e-6
    with pytest.raises(ValueError, match=r"tokens\.shape"):
        decoder.logits(torch.tensor([7, 8]))


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
def test_bfloat16(mixer: str) -> None:
    """The model's own arithmetic on a GPU; the interpreter cuts where a GPU rounds, so the bound is wide."""
    model = build(mixer, **EVEN)
    decoder, state = Decoder(model, 1, LARGE), model.init_state(1)
    for ids in torch.randint(0, 100, (3, 1)):
        with torch.no_grad():
            logits, state = model.step(ids, state)
        assert difference(decoder.logits(ids), logits) < 2e-2


def test_bfloat16_weights_are_shared() -> None:
    model = build("rglru", **EVEN)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(torch.bfloat16)
    weights, block = weights_of(model), model.blocks[0]
    assert weights.embedding.data_ptr() == model.embedding.weight.data_ptr()
    assert weights.blocks[0].up.weight.data_ptr() == block.mlp.up.weight.data_ptr()  # type: ignore[union-attr]
    assert weights.blocks[0].mixer.input_weight.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_refusals() -> None:
    delta = RecurrentLM(40, 16, 16, 1, mixer="gated_delta", num_heads=2)
    with pytest.raises(ValueError, match=r"gated_delta.*model\.step"):
        Decoder(delta)
    with pytest.raises(ValueError, match=r"width=31.*model\.step"):
        Decoder(RecurrentLM(40, 31, 32, 1))
    model = build("samu", **EVEN)
    with pytest.raises(ValueError, match="batch_size=17"):
        Decoder(model, 17)
    assert why_not(model) is None
    with pytest.raises(ValueError, match="state="):
        Decoder(model, 2).load(model.init_state(3))


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": [4, 4]},
        {"output": [3, 4]},
        {"output": [4]},
        {"output": [4, 4, 0, 3]},
        {"output": "44"},
        {"overlap": 1},
    ],
)
def test_odd_plans(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Plan().changed(changes)


def test_plan_and_back() -> None:
    assert Plan().changed(SMALL.as_dict()) == SMALL
