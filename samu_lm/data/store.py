"""The tokenized corpus: one flat array of tokens with offsets, in memory or mapped from a cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.files import launch_path
from samu_lm.data.sources import Source
from samu_lm.data.split import content_hash, threshold_of_stream
from samu_lm.data.tokenizers import Tokenizer
from samu_lm.errors import ConfigError

log = logging.getLogger(__name__)

FORMAT = 1
_CHUNK_BYTES = 1 << 23
# How often an entry is written that cannot be opened afterwards: without locks, another job may be replacing it.
_ATTEMPTS = 3
_ARRAYS = ("offsets", "num_bytes", "hashes")


@dataclass(frozen=True, eq=False)
class TokenStore:
    """All documents of a corpus, tokenized, in the source's order.

    Attributes:
        tokens: ``[T]`` uint16 or uint32, possibly mapped from a file, or `ShardTokens`.
        offsets: ``[N + 1]`` int64, document n is ``tokens[offsets[n]:offsets[n + 1]]``.
        num_bytes: ``[N]`` int64, bytes of each document's text.
        hashes: ``[N]`` uint64, ``content_hash`` of each text.
        num_empty: documents without text, left out.
        num_skipped: faulty documents, left out because of ``on_error=skip``.
    """

    tokens: Any
    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    num_empty: int
    num_skipped: int

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped array would be pickled with its contents; worker processes that are not forked map the file again.
        fields = (self.offsets, self.num_bytes, self.hashes, self.num_empty, self.num_skipped)
        if isinstance(self.tokens, np.memmap) and self.tokens.filename is not None:
            return _reopen, (str(self.tokens.filename), self.tokens.dtype.str, *fields)
        return type(self), (self.tokens, *fields)


def _reopen(path: str, dtype: str, *fields: Any) -> TokenStore:
    return TokenStore(np.memmap(path, dtype=np.dtype(dtype), mode="r"), *fields)


def load_stores(
    source: Source, tokenizer: Tokenizer, val_fraction: float, cache_dir: str | None = None
) -> dict[str, TokenStore]:
    """`load_store` of every part of a mixture, by name; of a source that is no mixture under the empty name."""
    parts = source.parts()
    for part in parts.values():
        if not tokenizer.is_trained and (own := part.tokenizer()) is not None:
            tokenizer.load_state_dict(own.state_dict())
    if len(parts) > 1:
        train_tokenizer(source, tokenizer, val_fraction)
    return {name: load_store(part, tokenizer, val_fraction, cache_dir) for name, part in parts.items()}


def load_store(source: Source, tokenizer: Tokenizer, val_fraction: float, cache_dir: str | None = None) -> TokenStore:
    """Reads and tokenizes the corpus, or finds it in the cache; shards are tokenized already.

    A tokenizer that is not trained is trained on the training documents. The cache entry is named by the contents of
    the corpus and the tokenizer, is complete before it has its name, and is verified when opened; a damaged one is
    made anew. Jobs that start together make one between them.

    Raises:
        ConfigError: no document, a fault in the corpus, or a cache folder that cannot be written.
    """
    if (store := source.tokenized()) is not None:
        return store
    if cache_dir is None:
        return _tokenize(source, tokenizer, val_fraction)
    folder = launch_path(cache_dir)
    vocabulary = tokenizer.fingerprint()
    if not tokenizer.is_trained:
        vocabulary += f" on 1-{val_fraction!r}"  # the training split decides what is learnt
    identity = f"{FORMAT} {source.fingerprint()} {vocabulary}"
    entry = folder / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(entry.with_suffix(".lock")):
            store = _open_entry(entry, tokenizer)
            for _ in range(_ATTEMPTS):
                if store is not None:
                    break
                _write_entry(entry, source, tokenizer, val_fraction)
                store = _open_entry(entry, tokenizer)
    except OSError as error:
        remedy = f"cannot be written or read ({error.strerror or error}); choose another folder, or null for no cache"
        raise ConfigError("data.cache_dir", cache_dir, remedy) from error
    if store is None:
        raise ConfigError("data.cache_dir", cache_dir, f"{entry} is damaged as soon as written; check the disk")
    return store


def _tokenize(source: Source, tokenizer: Tokenizer, val_fraction: float, file: BinaryIO | None = None) -> TokenStore:
    """Tokenizes every document, into ``file`` where given (``tokens`` is then empty)."""
    train_tokenizer(source, tokenizer, val_fraction)
    parts: list[NDArray[Any]] = []
    counts, sizes, contents = array("q"), array("q"), array("Q")  # eight bytes a document
    for texts in text_chunks(_some(source)):
        encoded = tokenizer.encode_many(texts)
        tokens = np.concatenate(encoded).astype(tokenizer.dtype, copy=False)
        if file is None:
            parts.append(tokens)
        else:
            file.write(tokens.tobytes())
        counts.extend(len(ids) for ids in encoded)
        sizes.extend(len(text) for text in texts)
        contents.extend(content_hash(text) for text in texts)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return TokenStore(
        tokens=np.concatenate(parts) if parts else np.zeros(0, dtype=tokenizer.dtype),
        offsets=offsets,
        num_bytes=np.array(sizes, dtype=np.int64),
        hashes=np.array(contents, dtype=np.uint64),
        num_empty=source.num_empty,
        num_skipped=source.num_skipped,
    )


def train_tokenizer(source: Source, tokenizer: Tokenizer, val_fraction: float) -> None:
    """Trains a tokenizer that is not trained yet, on the training documents.

    Raises:
        ConfigError: no document, or fewer than two different ones.
    """
    if not tokenizer.is_trained:
        threshold = threshold_of_stream((content_hash(text) for text in _some(source)), val_fraction)
        tokenizer.train(text for text in source.documents() if content_hash(text) >= threshold)


def _some(source: Source) -> Iterator[bytes]:
    """The documents, of which there must be one."""
    none = True
    for text in source.documents():
        none = False
        yield text
    if none:
        key, value = source.name()
        left_out = f"{source.num_empty} empty and {source.num_skipped} faulty documents were left out"
        raise ConfigError(key, value, f"the corpus is empty: it has no document with text ({left_out})")


def text_chunks(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Documents in lists of some megabytes."""
    chunk: list[bytes] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # Only saves work: without it two jobs would both tokenize, and the second to finish would find the entry there.
    try:
        import fcntl
    except ImportError:  # no such module on Windows
        yield
        return
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("data.cache_dir: no file locks there (%s); jobs that start together tokenize each", error)
        yield


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_entry(entry: Path, source: Source, tokenizer: Tokenizer, val_fraction: float) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        with open(work / "tokens.bin", "wb") as file:
            store = _tokenize(source, tokenizer, val_fraction, file)
            file.flush()
            os.fsync(file.fileno())
        for name in _ARRAYS:
            with open(work / f"{name}.npy", "wb") as file:
                np.save(file, getattr(store, name))
                file.flush()
                os.fsync(file.fileno())
        meta = {
            "format": FORMAT,
            "dtype": np.dtype(tokenizer.dtype).str,
            "num_empty": store.num_empty,
            "num_skipped": store.num_skipped,
            "tokenizer": tokenizer.state_dict(),
            "digests": {path.name: _digest(path) for path in sorted(work.iterdir())},
        }
        (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        # Another job's, where there are no locks, stays: taken away, it would be missed by who is about to open it.
        if entry.exists() and _open_entry(entry, tokenizer) is None:
            with contextlib.suppress(OSError):  # mapped files live on until they are closed
                os.rename(entry, work / "replaced")
        with contextlib.suppress(OSError):  # another job's entry has the name: it holds the same
            os.rename(work, entry)
            shutil.rmtree(entry / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _open_entry(entry: Path, tokenizer: Tokenizer) -> TokenStore | None:
    """The store of a complete entry, None where there is none; the tokenizer takes over what the entry learnt."""
    if not entry.exists():
        return None
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        for name, digest in meta["digests"].items():
            if _digest(entry / name) != digest:
                raise ValueError(f"{name} differs from what was written")
        arrays = {name: np.load(entry / f"{name}.npy", allow_pickle=False) for name in _ARRAYS}
        tokens = np.memmap(entry / "tokens.bin", dtype=np.dtype(meta["dtype"]), mode="r")
        if not tokenizer.is_trained:
            tokenizer.load_state_dict(meta["tokenizer"])
        return TokenStore(tokens, **arrays, num_empty=meta["num_empty"], num_skipped=meta["num_skipped"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("data.cache_dir: %s is damaged (%s) and is made anew", entry, error)
        return None
