"""Tokenizers somebody else trained: a ``tokenizer.json``, a folder with one, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.files import launch_path
from samu_lm.data.subwords import BackendTokenizer, new_backend
from samu_lm.data.tokenizers import require_kind
from samu_lm.errors import ConfigError

_SPACE = "\u2581"  # what sentencepiece vocabularies write for a space


class PretrainedTokenizer(BackendTokenizer):
    """A pretrained tokenizer, loaded when first used.

    BOS and EOS are the tokenizer's own, as the ``tokenizer_config.json`` beside it declares them. Special tokens that a
    text spells out are encoded as the text they are. ``num_bytes`` is exact for byte-level and byte-fallback
    vocabularies (the families of GPT-2 and Llama), up to a space that the tokenizer itself puts before a text; for
    others it is the length of the decoded token.

    Args:
        path: a ``tokenizer.json`` file, a folder with one, or a name on the hub (needs ``transformers``).
        add_bos: begin each document with BOS; None does where the tokenizer declares one.
        add_eos: end each document with EOS; None does where the tokenizer declares one.
        bos_token: the token to use as BOS instead of the declared one, e.g. ``<s>``.
        eos_token: likewise for EOS.
    """

    kind = "pretrained"

    def __init__(
        self,
        path: str | None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        super().__init__(add_bos, add_eos)
        self.path = path
        self._tokens = {"bos": bos_token, "eos": eos_token}
        self._ids: dict[str, int | None] = {}

    def check(self) -> None:
        super().check()
        self._ready()

    def _ready(self) -> Any:
        if self._backend is None:
            text, declared = _load(self.path)
            backend = self._use(text)
            for name, token in self._tokens.items():
                if token is not None and backend.token_to_id(token) is None:
                    raise ConfigError(
                        f"tokenizer.{name}_token", token, f"the vocabulary of {self.path} has no such token"
                    )
                declared[name] = token if token is not None else declared.get(name)
            self._ids = {
                name: backend.token_to_id(token) if token is not None else None for name, token in declared.items()
            }
            for name, wanted in (("bos", self._add_bos), ("eos", self._add_eos)):
                if wanted and self._ids[name] is None:
                    remedy = (
                        f"{self.path} declares no {name.upper()}; name one of its tokens with tokenizer.{name}_token"
                    )
                    raise ConfigError(f"tokenizer.add_{name}", True, f"{remedy}, or set this to false")
            self._backend = backend
        return self._backend

    def _use(self, text: str) -> Any:
        try:
            backend = new_backend(text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError("tokenizer.path", self.path, f"not a tokenizer.json ({error})") from error
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # "</s>" written in a document is text, no end of a document
        self._lengths = None
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        return backend

    @property
    def add_bos(self) -> bool:
        bos = self.bos_id
        return bos is not None if self._add_bos is None else self._add_bos

    @property
    def add_eos(self) -> bool:
        eos = self.eos_id
        return eos is not None if self._add_eos is None else self._add_eos

    @property
    def vocab_size(self) -> int:
        self._ready()
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        self._ready()
        return self._ids["bos"]

    @property
    def eos_id(self) -> int | None:
        self._ready()
        return self._ids["eos"]

    @property
    def pad_id(self) -> int:
        self._ready()
        pad = self._ids["pad"]
        return super().pad_id if pad is None else pad

    def _byte_lengths(self) -> NDArray[np.int64]:
        backend = self._ready()
        layout = json.loads(backend.to_str())
        decoder = layout.get("decoder") or {}
        decoders = {d["type"] for d in decoder.get("decoders", [decoder]) if d}
        added = {t["id"]: 0 if t["special"] else len(t["content"].encode()) for t in layout["added_tokens"]}
        added.update({i: 0 for i in self._ids.values() if i is not None})

        def length(token_id: int) -> int:
            if token_id in added:
                return added[token_id]
            token = backend.id_to_token(token_id)
            if token is None:
                return 0
            if "ByteLevel" in decoders:
                return len(token)  # in the byte-level alphabet one character is one byte
            if decoders & {"ByteFallback", "Metaspace"}:
                is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
                return 1 if is_byte else len(token.replace(_SPACE, " ").encode())
            return len(backend.decode([token_id]).encode())

        return np.array([length(i) for i in range(self.vocab_size)], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        backend = self._ready()
        return {
            "kind": self.kind,
            "path": str(self.path),
            "json": backend.to_str(),
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            **{f"{name}_id": token_id for name, token_id in self._ids.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_kind(self, state)
        self.path = state["path"]
        self._backend = self._use(state["json"])
        self._add_bos, self._add_eos = state["add_bos"], state["add_eos"]
        self._ids = {name: state[f"{name}_id"] for name in ("bos", "eos", "pad")}


def _load(path: str | None) -> tuple[str, dict[str, str | None]]:
    """The ``tokenizer.json`` text and the declared special tokens by name: bos, eos, pad."""
    key = "tokenizer.path"
    if not path:
        raise ConfigError(key, path, "give a tokenizer.json file, a folder with one, or a name on the Hugging Face hub")
    local = launch_path(path)
    file = local / "tokenizer.json" if local.is_dir() else local
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8"), _declared(file.parent)
        except (OSError, ValueError) as error:
            raise ConfigError(key, path, f"cannot be read ({error})") from error
    if not local.is_dir() and (path.startswith((".", "/", "~")) or path.endswith(".json") or path.count("/") > 1):
        raise ConfigError(key, path, f"no such file or folder: {local}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        remedy = (
            f"no such file ({local}), and a name on the hub needs transformers: pip install 'samu-lm[transformers]'"
        )
        raise ConfigError(key, path, remedy) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(local) if local.is_dir() else path)
        return loaded.backend_tokenizer.to_str(), {
            "bos": loaded.bos_token,
            "eos": loaded.eos_token,
            "pad": loaded.pad_token,
        }
    except (
        Exception
    ) as error:  # every kind, from OSError to those of the HTTP client and of a tokenizer without a backend
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(key, path, f"no such file ({local}), and transformers cannot load it ({lines[0]})") from error


def _declared(folder: Path) -> dict[str, str | None]:
    tokens: dict[str, str | None] = {"bos": None, "eos": None, "pad": None}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later file has the last word
        if not (folder / name).is_file():
            continue
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        for token in tokens:
            value = settings.get(f"{token}_token")
            value = value.get("content") if isinstance(value, dict) else value
            tokens[token] = value or tokens[token]
    return tokens
