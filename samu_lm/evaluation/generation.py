"""Sampling text: one parallel pass over the prompt, then token by token from the state.

Sizes: S samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samu_lm.data import Tokenizer
from samu_lm.errors import ConfigError, SamuLMError
from samu_lm.model import ModelState, RecurrentLM

# Tokens of a prompt run at once: bounds the logits of a long prompt; chunked and whole prefill agree.
PREFILL_CHUNK = 1024


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    Attributes:
        max_new_tokens: tokens to add at most, at least 0.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: choose among the k most likely tokens; None for all.
        top_p: choose among the fewest most likely tokens whose probabilities sum to at least p, in (0, 1].
        seed: sample i draws from a generator seeded with seed + i, so it does not depend on the other samples.
        num_samples: continuations to draw, at least 1.
    """

    max_new_tokens: int = 200
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    num_samples: int = 1

    def check(self) -> None:
        """Raises ConfigError that names the first value that makes no sense."""
        rules: dict[str, tuple[bool, str]] = {
            "max_new_tokens": (_is_int(self.max_new_tokens, 0), "must be a whole number, 0 or more"),
            "temperature": (_is_real(self.temperature), "must be 0 (greedy) or a positive number"),
            "top_k": (self.top_k is None or _is_int(self.top_k, 1), "must be a whole number, 1 or more, or null"),
            "top_p": (_is_real(self.top_p) and 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "seed": (_is_int(self.seed, 0), "must be a whole number, 0 or more"),
            "num_samples": (_is_int(self.num_samples, 1), "must be a whole number, 1 or more"),
        }
        for key, (good, remedy) in rules.items():
            if not good:
                raise ConfigError(key, getattr(self, key), remedy)


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt as a document begins in training: BOS where training puts one, once, and no EOS.

    Raises:
        ConfigError: the prompt is empty and the tokenizer puts no BOS, so there is nothing to start from.
    """
    ids = tokenizer.encode(prompt, add_eos=False).tolist()
    if not ids:
        remedy = "is empty and the tokenizer adds no BOS to start from; give at least one character"
        raise ConfigError("prompt", "''", remedy)
    return ids


def prefill(
    model: RecurrentLM, ids: Sequence[int], *, device: torch.device, chunk: int = PREFILL_CHUNK
) -> tuple[Tensor, ModelState]:
    """Runs a prompt from an empty state.

    Args:
        ids: the prompt's ids, at least one.
        device: the model's.
        chunk: tokens run at once.

    Returns:
        Logits of the token after the prompt, [1, V], and the state after the prompt.
    """
    tokens = torch.tensor([list(ids)], dtype=torch.int64, device=device)
    state = model.init_state(1)
    for piece in tokens.split(chunk, dim=1):
        logits, state = model(piece, state=state, return_state=True)
    return logits[:, -1], state


def next_token_probabilities(logits: Tensor, sampling: Sampling, never: Tensor) -> Tensor:
    """The distribution that a token is drawn from.

    Args:
        logits: [V], any floating type.
        sampling: temperature, top_k and top_p are used, in this order.
        never: bool [V], True for ids that must not come out.

    Returns:
        float64 [V] on the CPU, summing to 1; with temperature 0 all of it on the most likely id, the lowest of equals.

    Raises:
        SamuLMError: the logits are not finite numbers.
    """
    logits = logits.detach().double().cpu()
    if not bool(torch.isfinite(logits).all()):
        raise SamuLMError("the model's logits are not finite; the checkpoint's weights are broken, take an earlier one")
    logits = logits.masked_fill(never, -torch.inf)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    ordered, order = torch.sort((logits - logits.max()) / sampling.temperature, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = -torch.inf
    shares = torch.softmax(ordered, dim=0)
    # A token stays while those before it do not reach top_p yet; the first always stays.
    if sampling.top_p < 1:
        shares = torch.where(shares.cumsum(0) - shares < sampling.top_p, shares, 0.0)
    return torch.zeros_like(shares).index_copy_(0, order, shares / shares.sum())


def generate(
    model: RecurrentLM,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    device: torch.device,
    stop_id: int | None = None,
    never: Iterable[int] = (),
) -> list[list[int]]:
    """Draws continuations of one prompt.

    Args:
        prompt: ids, BOS included, at least one.
        sampling: checked with `sampling.check()`.
        stop_id: ends a sample; it is not part of the result.
        never: ids that are not drawn.

    Returns:
        S lists of at most `max_new_tokens` ids; equal for equal arguments on one machine.
    """
    forbidden = torch.zeros(model.vocab_size, dtype=torch.bool)
    forbidden[list(never)] = True
    count = sampling.num_samples
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(count)]
    samples: list[list[int]] = [[] for _ in range(count)]
    with torch.inference_mode():
        logits, state = prefill(model, prompt, device=device)
        logits = logits.expand(count, -1)
        state = state.select(torch.zeros(count, dtype=torch.int64, device=device))
        alive = list(range(count))  # sample of each row that still runs
        for step in range(sampling.max_new_tokens):
            shares = [next_token_probabilities(row, sampling, forbidden) for row in logits]
            drawn = [int(torch.multinomial(p, 1, generator=generators[i])) for p, i in zip(shares, alive, strict=True)]
            rows = [row for row, token in enumerate(drawn) if token != stop_id]
            for row in rows:
                samples[alive[row]].append(drawn[row])
            if not rows or step + 1 == sampling.max_new_tokens:
                break
            if len(rows) < len(alive):
                state = state.select(torch.tensor(rows, device=device))
                alive = [alive[row] for row in rows]
            logits, state = model.step(torch.tensor([drawn[row] for row in rows], device=device), state)
    return samples


def never_sampled(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Ids without text to add: BOS, padding, and ids of the model beyond the tokenizer's. EOS is not among them."""
    special = {i for i in (tokenizer.bos_id, tokenizer.pad_id) if i is not None and i != tokenizer.eos_id}
    return sorted({i for i in special if i < vocab_size} | set(range(tokenizer.vocab_size, vocab_size)))


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
