"""A tokenizer from its saved state."""

from __future__ import annotations

from typing import Any

from samu_lm.data.pretrained import PretrainedTokenizer
from samu_lm.data.subwords import BPETokenizer
from samu_lm.data.tokenizers import ByteTokenizer, Tokenizer
from samu_lm.errors import ConfigError


def tokenizer_from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer that gave ``state``, e.g. a checkpoint's ``["samu_lm"]["tokenizer"]``.

    Raises:
        ConfigError: not a tokenizer's state.
    """
    kind = state.get("kind")
    tokenizer: Tokenizer
    if kind == ByteTokenizer.kind:
        tokenizer = ByteTokenizer()
    elif kind == BPETokenizer.kind:
        tokenizer = BPETokenizer(vocab_size=state["vocab_size"])
    elif kind == PretrainedTokenizer.kind:
        tokenizer = PretrainedTokenizer(path=state["path"])
    else:
        raise ConfigError(
            "tokenizer", kind, "the saved tokenizer is of no kind this version knows: bytes, bpe, pretrained"
        )
    tokenizer.load_state_dict(state)
    return tokenizer


def require_same_tokenizer(given: Tokenizer, own: Tokenizer, place: object) -> None:
    """Refuses a tokenizer other than the one that made some tokens; one that is not trained may have its settings.

    Raises:
        ConfigError: names both.
    """
    wanted, saved = _settings(given), _settings(own)
    if wanted == saved if not given.is_trained else given.fingerprint() == own.fingerprint():
        return
    differing = [k for k in saved if k not in ("kind", "path") and wanted.get(k) != saved[k]]
    if given.kind != own.kind:
        ours, theirs = given.kind, own.kind
    elif differing:
        ours, theirs = (", ".join([given.kind, *(f"{k}={s[k]}" for k in differing)]) for s in (wanted, saved))
    else:
        ours, theirs = given.kind, f"{own.kind} with another vocabulary"
    remedy = (
        f"the tokens in {place} are of tokenizer={theirs}; leave tokenizer= out, or prepare the corpus with this one"
    )
    raise ConfigError("tokenizer", ours, remedy)


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    return {key: value for key, value in tokenizer.state_dict().items() if key != "json"}
