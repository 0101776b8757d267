"""Tokenizers: what all share, and bytes. ``subwords.py`` learns a vocabulary, ``pretrained.py`` loads one.

A text is encoded with BOS before and EOS after it as ``add_bos`` and ``add_eos`` say; special ids never come from the
text itself, whatever it contains.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samu_lm.errors import ConfigError

Ids = NDArray[np.integer[Any]]


class Tokenizer(ABC):
    """Text to ids and back."""

    kind: str

    def __init__(self, add_bos: bool | None, add_eos: bool | None) -> None:
        self._add_bos = add_bos
        self._add_eos = add_eos
        self._lengths: NDArray[np.int64] | None = None

    @property
    def add_bos(self) -> bool:
        """Whether ``encode`` begins each text with ``bos_id``."""
        return bool(self._add_bos)

    @property
    def add_eos(self) -> bool:
        """Whether ``encode`` ends each text with ``eos_id``."""
        return bool(self._add_eos)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    @abstractmethod
    def bos_id(self) -> int | None:
        """Id that begins a document, None where the vocabulary has none (``add_bos`` is then False)."""

    @property
    @abstractmethod
    def eos_id(self) -> int | None:
        """Id that ends a document, None where the vocabulary has none."""

    @property
    def pad_id(self) -> int:
        """Id that fills rows; never a target."""
        return self.eos_id if self.eos_id is not None else 0

    @property
    def is_trained(self) -> bool:
        """False for a vocabulary that must first be learnt from the training documents."""
        return True

    def check(self) -> None:
        """Refuses settings that cannot work, before data is read.

        Raises:
            ConfigError: names the key under ``tokenizer.``.
        """
        for name, value in (("add_bos", self._add_bos), ("add_eos", self._add_eos)):
            if not isinstance(value, bool | None):
                raise ConfigError(f"tokenizer.{name}", value, "give true or false")

    def train(self, texts: Iterable[bytes]) -> None:
        """Learns the vocabulary from UTF-8 texts; only for a tokenizer that is not ``is_trained``."""
        raise RuntimeError(f"a {self.kind} tokenizer has nothing to learn")

    @abstractmethod
    def _encode_texts(self, texts: Sequence[bytes]) -> list[Ids]:
        """Ids of each UTF-8 text, without BOS and EOS."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special ids give nothing, bytes that are not UTF-8 give U+FFFD."""

    @abstractmethod
    def _byte_lengths(self) -> NDArray[np.int64]:
        """``[vocab_size]``: bytes of text each id stands for."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that ``tokenizer_from_state`` needs, as plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the vocabulary and settings of ``state``, which a tokenizer of the same kind gave."""

    def encode(
        self, text: str | bytes, *, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> NDArray[np.int64]:
        """Ids of a text.

        Args:
            text: a str, or bytes (UTF-8 unless this is the bytes tokenizer, which takes any).
            add_bos: instead of the tokenizer's own setting, e.g. True for a prompt.
            add_eos: likewise, e.g. False for a prompt.

        Returns:
            ``[n]`` int64.

        Raises:
            ValueError: BOS or EOS asked of a vocabulary without one.
        """
        return self.encode_many([text.encode() if isinstance(text, str) else text], add_bos, add_eos)[0].astype(
            np.int64
        )

    def encode_many(
        self, texts: Sequence[bytes], add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[Ids]:
        """Ids of each text, as ``encode`` gives them but in ``dtype``."""
        before = [self._special("add_bos", self.bos_id)] if (self.add_bos if add_bos is None else add_bos) else []
        after = [self._special("add_eos", self.eos_id)] if (self.add_eos if add_eos is None else add_eos) else []
        encoded = self._encode_texts(texts)
        if not before and not after:
            return encoded
        head, tail = np.array(before, dtype=self.dtype), np.array(after, dtype=self.dtype)
        return [np.concatenate([head, ids, tail]) for ids in encoded]

    @staticmethod
    def _special(argument: str, token_id: int | None) -> int:
        if token_id is None:
            raise ValueError(f"{argument}=True: this tokenizer's vocabulary has no such token; use False")
        return token_id

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """The smallest unsigned type of at least 16 bits that holds every id."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def num_bytes(self, ids: Any) -> NDArray[np.int64]:
        """Bytes of text that each id stands for, 0 for special ids.

        Args:
            ids: array or tensor (on the CPU) of ids, any shape.

        Returns:
            int64 of the same shape.
        """
        if self._lengths is None:
            self._lengths = self._byte_lengths()
        return self._lengths[np.asarray(ids, dtype=np.int64)]

    def fingerprint(self) -> str:
        """Hash of the state, wherever it was loaded from: equal tokenizers give equal ids."""
        state = {k: v for k, v in self.state_dict().items() if k != "path"}
        return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes themselves, 256 is BOS, 257 is EOS. Nothing is learnt and nothing is lost.

    Args:
        add_bos: begin each document with BOS.
        add_eos: end each document with EOS.
    """

    kind = "bytes"

    def __init__(self, add_bos: bool = True, add_eos: bool = True) -> None:
        super().__init__(add_bos, add_eos)

    @property
    def vocab_size(self) -> int:
        return 258

    @property
    def bos_id(self) -> int:
        return 256

    @property
    def eos_id(self) -> int:
        return 257

    def _encode_texts(self, texts: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(text, dtype=np.uint8).astype(self.dtype) for text in texts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that were encoded, whatever they were."""
        array = np.asarray(list(ids), dtype=np.int64)
        return array[array < 256].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def _byte_lengths(self) -> NDArray[np.int64]:
        return (np.arange(self.vocab_size) < 256).astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "add_bos": self.add_bos, "add_eos": self.add_eos}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_kind(self, state)
        self._add_bos, self._add_eos = state["add_bos"], state["add_eos"]


def require_kind(tokenizer: Tokenizer, state: dict[str, Any]) -> None:
    """Raises ConfigError where ``state`` is another kind of tokenizer's."""
    if state.get("kind") != tokenizer.kind:
        raise ConfigError(
            "tokenizer", tokenizer.kind, f"the saved tokenizer is of kind {state.get('kind')!r}; use that"
        )
