"""Sampling: the rules of the distribution, agreement of prefill and decoding, determinism, what never comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samu_lm.data import ByteTokenizer
from samu_lm.errors import ConfigError, SamuLMError
from samu_lm.evaluation.generation import (
    Sampling,
    generate,
    never_sampled,
    next_token_probabilities,
    prefill,
    prompt_tokens,
)
from samu_lm.model import ModelState, RecurrentLM

CPU = torch.device("cpu")


def small_model(mixer: str = "samu", vocab_size: int = 258) -> RecurrentLM:
    model = RecurrentLM(vocab_size, width=16, rnn_width=32, depth=2, mixer=mixer, num_blocks=4)
    with torch.no_grad():  # away from the start, where SAMU's controls and the norms do nothing yet
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def probabilities(logits: list[float], never: tuple[int, ...] = (), **rules: Any) -> list[float]:
    forbidden = torch.zeros(len(logits), dtype=torch.bool)
    forbidden[list(never)] = True
    return next_token_probabilities(torch.tensor(logits), Sampling(**rules), forbidden).tolist()


SHARES = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor(SHARES, dtype=torch.float64).log().tolist()


def test_temperature_one_is_the_softmax() -> None:
    assert probabilities(LOGITS) == pytest.approx(SHARES, rel=1e-6)


def test_temperature_reshapes_and_zero_is_greedy() -> None:
    halved = [p**2 for p in SHARES]
    assert probabilities(LOGITS, temperature=0.5) == pytest.approx([p / sum(halved) for p in halved], rel=1e-6)
    assert probabilities(LOGITS, temperature=0) == [1, 0, 0, 0]
    assert probabilities([1.0, 7.0, 7.0], temperature=0) == [0, 1, 0], "the lowest of equals"
    assert probabilities([0.0, 1.0], temperature=1e-300) == [0, 1], "no overflow on the way to greedy"


def test_top_k_keeps_exactly_k() -> None:
    assert probabilities(LOGITS, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], rel=1e-6)
    assert probabilities([1.0, 1.0, 1.0], top_k=2) == [0.5, 0.5, 0], "ties do not let a third in"
    assert probabilities(LOGITS, top_k=99) == pytest.approx(SHARES, rel=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.96, 4), (1.0, 4), (1e-9, 1)])
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: int) -> None:
    total = sum(SHARES[:kept])
    expected = [p / total if i < kept else 0.0 for i, p in enumerate(SHARES)]
    assert probabilities(LOGITS, top_p=top_p) == pytest.approx(expected, rel=1e-6)


def test_top_k_comes_before_top_p() -> None:
    # Of the two kept by top_k the first has 0.625 of the mass: enough for 0.6, where 0.5 of all would not be.
    assert probabilities(LOGITS, top_k=2, top_p=0.6) == [1, 0, 0, 0]


@pytest.mark.parametrize("rules", [{}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.1}, {"temperature": 9.0}])
def test_forbidden_ids_have_no_probability_however_likely(rules: dict[str, Any]) -> None:
    shares = probabilities([9.0, 1.0, 0.0, 8.0], never=(0, 3), **rules)
    assert (shares[0], shares[3]) == (0, 0)
    assert sum(shares) == pytest.approx(1)


def test_broken_logits_are_an_error() -> None:
    for broken in (float("nan"), float("inf")):
        with pytest.raises(SamuLMError, match="not finite"):
            probabilities([0.0, broken])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("num_samples", 0),
        ("seed", -1),
    ],
)
def test_senseless_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        Sampling(**{key: value}).check()
    Sampling().check()


@pytest.mark.parametrize("mixer", ["samu", "rglru", "gated_delta"])
@pytest.mark.parametrize("length", [0, 1, 3, 31, 64])
def test_prefill_decoding_and_the_parallel_pass_agree(mixer: str, length: int) -> None:
    """Of 300 tokens a prompt of `length` is prefilled, the rest decoded one by one: the parallel pass."""
    model = small_model(mixer)
    bound = 1e-3 if mixer == "gated_delta" else 2e-4  # a head's norm amplifies the rounding of outputs close to 0
    ids = torch.randint(0, 258, (1, 300), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        whole = model(ids)[0]
        state = model.init_state(1)
        if length:
            logits, state = prefill(model, ids[0, :length].tolist(), device=CPU)
            torch.testing.assert_close(logits[0], whole[length - 1], rtol=bound, atol=bound)
        for position in range(length, 300):
            logits, state = model.step(ids[:, position], state)
            torch.testing.assert_close(logits[0], whole[position], rtol=bound, atol=bound)


@pytest.mark.parametrize("chunk", [1, 2, 3, 31, 63, 64, 65])
def test_prefill_agrees_at_every_chunk(chunk: int) -> None:
    model = small_model()
    ids = torch.randint(0, 258, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        whole, whole_state = prefill(model, ids, device=CPU)
        cut, cut_state = prefill(model, ids, device=CPU, chunk=chunk)
    torch.testing.assert_close(cut, whole, rtol=2e-4, atol=2e-4)
    assert torch.equal(cut_state.tokens, whole_state.tokens)
    for a, b in zip(cut_state.recurrent, whole_state.recurrent, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mixer", ["samu", "rglru", "gated_delta"])
def test_greedy_equals_argmax_of_the_parallel_pass(mixer: str) -> None:
    model = small_model(mixer)
    prompt = [256, 72, 105]
    (sample,) = generate(model, prompt, Sampling(max_new_tokens=20, temperature=0), device=CPU)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert sample == ids[3:]


def test_same_seed_same_samples_and_each_is_its_own() -> None:
    model = small_model()
    rules = {"max_new_tokens": 12, "num_samples": 3}
    first = generate(model, [256, 65], Sampling(seed=5, **rules), device=CPU)
    assert generate(model, [256, 65], Sampling(seed=5, **rules), device=CPU) == first
    assert len({tuple(sample) for sample in first}) == 3
    alone = generate(model, [256, 65], Sampling(seed=6, max_new_tokens=12), device=CPU)
    assert alone == [first[1]], "sample i draws with seed + i, whatever the others do"
    assert torch.initial_seed() == 1234, "the global generator is left alone"


class Scripted(torch.nn.Module):
    """Stands for a model: after `n` tokens it is sure of `script[n]`, with the forbidden ids likelier still."""

    def __init__(self, script: list[int], vocab_size: int, louder: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.script, self.vocab_size, self.louder = script, vocab_size, louder
        self.steps = 0

    def init_state(self, batch_size: int) -> ModelState:
        return ModelState((), (), torch.zeros(batch_size, dtype=torch.int64))

    def _logits(self, seen: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(seen), self.vocab_size)
        for row, n in enumerate(seen.tolist()):
            logits[row, self.script[n]] = 50.0
        logits[:, list(self.louder)] = 90.0
        return logits

    def forward(self, ids: torch.Tensor, state: ModelState, return_state: bool) -> tuple[torch.Tensor, ModelState]:
        seen = state.tokens + ids.shape[1]
        return self._logits(seen)[:, None].expand(-1, ids.shape[1], -1), ModelState((), (), seen)

    def step(self, ids: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, ModelState]:
        self.steps += 1
        return self._logits(state.tokens + 1), ModelState((), (), state.tokens + 1)


def test_stops_at_eos_and_at_the_limit() -> None:
    script = [0, 0, 104, 105, 257, 106, 107]
    model: Any = Scripted(script, 258)
    rules = Sampling(max_new_tokens=50, num_samples=2)
    assert generate(model, [256, 65], rules, device=CPU, stop_id=257) == [[104, 105], [104, 105]]
    assert model.steps == 2, "nothing runs once every sample has ended"
    assert generate(model, [256, 65], Sampling(max_new_tokens=2), device=CPU, stop_id=257) == [[104, 105]]
    assert generate(model, [256, 65], Sampling(max_new_tokens=4), device=CPU) == [[104, 105, 257, 106]]
    assert generate(model, [256, 65], Sampling(max_new_tokens=0), device=CPU) == [[]]


def test_padding_and_ids_beyond_the_tokenizer_never_come_out() -> None:
    tokenizer = ByteTokenizer()
    beyond = tuple(range(tokenizer.vocab_size, 320))
    model: Any = Scripted([65] * 40, 320, louder=(*beyond, tokenizer.bos_id))
    never = never_sampled(tokenizer, 320)
    assert set(never) >= {*beyond, tokenizer.bos_id}
    assert tokenizer.eos_id not in never
    for temperature in (0, 1.0):
        rules = Sampling(max_new_tokens=20, temperature=temperature)
        assert generate(model, [65], rules, device=CPU, never=never) == [[65] * 20]


def test_rows_that_end_early_do_not_disturb_the_others() -> None:
    """With EOS likely, samples end at different steps; each still equals the sample drawn alone."""
    model = small_model()
    with torch.no_grad():
        model.embedding.weight[257] += 0.5 * model.embedding.weight[:256].mean(0)
    rules = {"max_new_tokens": 40, "temperature": 2.0}
    together = generate(model, [256], Sampling(num_samples=6, **rules), device=CPU, stop_id=257)
    for i, sample in enumerate(together):
        assert generate(model, [256], Sampling(seed=i, **rules), device=CPU, stop_id=257) == [sample]


def test_prompt_begins_as_a_document_does_in_training() -> None:
    tokenizer = ByteTokenizer()
    assert prompt_tokens(tokenizer, "hi") == [tokenizer.bos_id, 104, 105]
    assert prompt_tokens(tokenizer, "") == [tokenizer.bos_id]
    assert prompt_tokens(ByteTokenizer(add_bos=False), "hi") == [104, 105]
    with pytest.raises(ConfigError, match=r"^prompt=.*no BOS"):
        prompt_tokens(ByteTokenizer(add_bos=False), "")
    assert prompt_tokens(ByteTokenizer(add_bos=False, add_eos=False), "hi") == [104, 105]
