"""Byte-level BPE learnt from the corpus, and what every tokenizer on the ``tokenizers`` package shares."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.tokenizers import Ids, Tokenizer, require_kind
from samu_lm.errors import ConfigError

log = logging.getLogger(__name__)


def new_backend(text: str | None = None) -> Any:
    """An empty BPE, or the tokenizer of a ``tokenizer.json`` text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    return Backend(models.BPE()) if text is None else Backend.from_str(text)


class BackendTokenizer(Tokenizer):
    """What a ``tokenizers.Tokenizer`` does for both classes below."""

    _backend: Any = None

    def _encode_texts(self, texts: Sequence[bytes]) -> list[Ids]:
        encoded = self._ready().encode_batch_fast([t.decode() for t in texts], add_special_tokens=False)
        return [np.array(e.ids, dtype=self.dtype) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        backend = self._ready()
        special = {self.bos_id, self.eos_id}
        return backend.decode([i for i in map(int, ids) if i not in special], skip_special_tokens=True)

    def _ready(self) -> Any:
        if self._backend is None:
            raise RuntimeError("this tokenizer is not trained yet; call the data module's setup() first")
        return self._backend


class BPETokenizer(BackendTokenizer):
    """Byte-level BPE learnt from the training documents: any text is encoded without loss or unknown tokens.

    The two last ids are BOS and EOS. They stand outside the learnt vocabulary, so no text can spell them.

    Args:
        vocab_size: number of ids, at least 258 (256 bytes, BOS, EOS).
        add_bos: begin each document with BOS.
        add_eos: end each document with EOS.
        max_train_bytes: learn from so much text at most, from the corpus' beginning.
    """

    kind = "bpe"

    def __init__(
        self, vocab_size: int, add_bos: bool = True, add_eos: bool = True, max_train_bytes: int = 100_000_000
    ) -> None:
        super().__init__(add_bos, add_eos)
        self.requested_vocab_size = vocab_size
        self.max_train_bytes = max_train_bytes

    def check(self) -> None:
        super().check()
        if not isinstance(self.requested_vocab_size, int) or self.requested_vocab_size < 258:
            remedy = "give at least 258: 256 bytes, BOS and EOS"
            raise ConfigError("tokenizer.vocab_size", self.requested_vocab_size, remedy)
        if not isinstance(self.max_train_bytes, int) or self.max_train_bytes < 1:
            raise ConfigError("tokenizer.max_train_bytes", self.max_train_bytes, "give a positive number of bytes")

    @property
    def is_trained(self) -> bool:
        return self._backend is not None

    @property
    def vocab_size(self) -> int:
        """Number of ids; fewer than asked for where the corpus has no more pairs to merge."""
        return self._ready().get_vocab_size() + 2

    @property
    def bos_id(self) -> int:
        return self.vocab_size - 2

    @property
    def eos_id(self) -> int:
        return self.vocab_size - 1

    def train(self, texts: Iterable[bytes]) -> None:
        from tokenizers import decoders, pre_tokenizers, trainers

        backend = new_backend()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.requested_vocab_size - 2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(self._limited(texts), trainer)
        self._backend, self._lengths = backend, None
        if self.vocab_size < self.requested_vocab_size:
            log.warning(
                "tokenizer.vocab_size=%d: the training text has pairs for %d ids only; the vocabulary is that size",
                self.requested_vocab_size,
                self.vocab_size,
            )

    def _limited(self, texts: Iterable[bytes]) -> Iterator[str]:
        used = 0
        for text in texts:
            if used + len(text) > self.max_train_bytes and used:
                return
            used += len(text)
            yield text[: self.max_train_bytes].decode(errors="ignore")

    def _byte_lengths(self) -> NDArray[np.int64]:
        # in the byte-level alphabet one character is one byte
        learnt = [len(self._ready().id_to_token(i)) for i in range(self.vocab_size - 2)]
        return np.array([*learnt, 0, 0], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "vocab_size": self.requested_vocab_size,
            "max_train_bytes": self.max_train_bytes,
            "json": self._backend.to_str() if self._backend is not None else "",
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_kind(self, state)
        self._add_bos, self._add_eos = state["add_bos"], state["add_eos"]
        self.requested_vocab_size, self.max_train_bytes = state["vocab_size"], state["max_train_bytes"]
        self._backend, self._lengths = new_backend(state["json"]) if state["json"] else None, None
