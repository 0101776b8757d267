"""The decoder on a GPU: kernels that overlap, in a CUDA graph, are ``model.step``."""

from __future__ import annotations

import copy

import pytest
import torch

from samu_lm.model import Decoder, RecurrentLM
from samu_lm.ops.decode import Plan
from tests.model.test_decoder import EVEN, ODD, SMALL, build, difference

SIZES = {"vocab_size": 1000, "width": 768, "rnn_width": 1024, "depth": 6}


def compare(model: RecurrentLM, decoder: Decoder, tokens: int, bound: float) -> list[torch.Tensor]:
    """Decodes from the empty state; the logits of every token."""
    exact = copy.deepcopy(model).float()
    state = exact.init_state(decoder.batch_size)
    decoder.reset()
    decoder.tokens.copy_(torch.arange(decoder.batch_size) % model.vocab_size)
    logits = []
    for _ in range(tokens):
        ids = decoder.tokens.clone()
        decoder.advance()
        with torch.no_grad():
            expected, state = exact.step(ids, state)
        assert difference(decoder.last_logits, expected) < bound
        assert torch.equal(decoder.tokens, decoder.last_logits.argmax(-1))
        logits.append(decoder.last_logits.clone())
    return logits


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
@pytest.mark.parametrize(
    ("sizes", "plan", "batch"), [(EVEN, None, 1), (ODD, SMALL, 3), (SIZES, None, 16)], ids=["even", "odd", "large"]
)
def test_step(mixer: str, sizes: dict[str, int], plan: Plan | None, batch: int) -> None:
    model = build(mixer, **sizes).cuda()
    compare(model, Decoder(model, batch, plan, torch.float32), 12, 3e-5)
    compare(model, Decoder(model, batch, plan), 12, 2e-2)


@pytest.mark.parametrize("mixer", ["samu", "rglru"])
def test_graph(mixer: str) -> None:
    """A graph gives the bits of launches one by one, with overlap and without, again and again."""
    model = build(mixer, **SIZES).cuda()
    apart = compare(model, Decoder(model, 2, Plan().changed({"overlap": False})), 100, 2e-2)
    decoder = Decoder(model, 2)
    for run in (decoder, decoder.capture(), decoder):
        assert all(torch.equal(a, b) for a, b in zip(compare(model, run, 100, 2e-2), apart, strict=True))


def test_capture_keeps_tokens_and_state() -> None:
    model = build("samu", **SIZES).cuda()
    decoder = Decoder(model, 2)
    decoder.logits(torch.tensor([5, 6], device="cuda"))
    before, tokens = decoder.state, decoder.tokens.clone()
    after = decoder.capture().state
    for a, b in zip(before.conv + before.recurrent, after.conv + after.recurrent, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(decoder.tokens, tokens) and torch.equal(before.tokens, after.tokens)
