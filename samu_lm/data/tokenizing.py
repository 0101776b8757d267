"""Texts to tokens in several processes, in the source's order and in bounded memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.restore import tokenizer_from_state
from samu_lm.data.sources import Place, Source
from samu_lm.data.split import content_hash
from samu_lm.data.tokenizers import Tokenizer
from samu_lm.errors import SamuLMError

DOCUMENT = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("hash", "<u8")])
_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 1 << 13


class Chunk(NamedTuple):
    """Documents that are tokenized together, and what was read up to their end since the chunk before."""

    texts: list[bytes]
    end: Place
    empty: int
    skipped: int


class Tokens(NamedTuple):
    """A chunk tokenized: all ids end to end, and the documents' lengths, sizes and hashes."""

    ids: NDArray[Any]
    documents: NDArray[Any]


def _chunks(source: Source, start: Place) -> Iterator[Chunk]:
    """The records from a place on; the last chunk may hold no document."""
    texts: list[bytes] = []
    size = empty = 0
    end, skipped, source.num_skipped = start, 0, 0
    for end, text in source.records(start):
        if text:
            texts.append(text)
            size += len(text)
        elif text is not None:
            empty += 1
        if size >= _CHUNK_BYTES or len(texts) >= _CHUNK_DOCUMENTS:
            yield Chunk(texts, end, empty, source.num_skipped - skipped)
            texts, size, empty, skipped = [], 0, 0, source.num_skipped
    yield Chunk(texts, end, empty, source.num_skipped - skipped)


# Seconds without a result after which the processes are looked at.
_PATIENCE = 2.0
_own: Tokenizer | None = None  # of a tokenizing process


def _start_worker(state: dict[str, Any]) -> None:
    """Runs first in a tokenizing process."""
    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as are wanted
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()
    _own = tokenizer_from_state(state)


def _tokenize_in_worker(texts: list[bytes]) -> Tokens:
    assert _own is not None
    return _tokenize(_own, texts)


def _tokenize(tokenizer: Tokenizer, texts: list[bytes]) -> Tokens:
    encoded = tokenizer.encode_many(texts)
    documents = np.empty(len(texts), dtype=DOCUMENT)
    documents["tokens"] = [len(ids) for ids in encoded]
    documents["bytes"] = [len(text) for text in texts]
    documents["hash"] = [content_hash(text) for text in texts]
    ids = np.concatenate(encoded) if encoded else np.zeros(0)
    return Tokens(ids.astype(np.dtype(tokenizer.dtype).newbyteorder("<"), copy=False), documents)


def _result(pool: ProcessPoolExecutor, future: Future[Tokens]) -> Tokens:
    """What a process returns, or BrokenProcessPool where one has died.

    The pool notices a death by itself, unless the process died in the middle of handing over a result: the pool then
    waits for the rest of it without end, because this process holds the pipe's other end open as well.
    """
    while True:
        try:
            return future.result(timeout=_PATIENCE)
        except TimeoutError:
            processes = list((pool._processes or {}).values())
            if all(process.is_alive() for process in processes):
                continue
        try:
            return future.result(timeout=_PATIENCE)
        except TimeoutError:
            for process in processes:
                process.kill()
            with contextlib.suppress(OSError):
                pool._result_queue._writer.close()  # type: ignore[attr-defined]


def tokenized(source: Source, start: Place, tokenizer: Tokenizer, workers: int) -> Generator[tuple[Chunk, Tokens]]:
    """Chunks with their tokens, in the source's order.

    Args:
        source: the corpus.
        start: where in it to begin.
        tokenizer: trained.
        workers: processes that tokenize; 0: this one.

    Raises:
        ConfigError: a fault in the corpus.
        SamuLMError: a tokenizing process died.
    """
    if workers == 0:
        for chunk in _chunks(source, start):
            yield chunk, _tokenize(tokenizer, chunk.texts)
        return
    context = multiprocessing.get_context("spawn")  # the libraries' threads do not survive a fork
    under_way: deque[tuple[Chunk, Future[Tokens]]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer.state_dict(),))
    try:
        for chunk in _chunks(source, start):
            under_way.append((chunk._replace(texts=[]), pool.submit(_tokenize_in_worker, chunk.texts)))
            while under_way and (len(under_way) > 2 * workers + 2 or under_way[0][1].done()):
                meta, future = under_way.popleft()
                yield meta, _result(pool, future)
        while under_way:
            meta, future = under_way.popleft()
            yield meta, _result(pool, future)
    except BrokenProcessPool as error:
        remedy = "a tokenizing process died, killed by the system where memory is short; run the same command to go on"
        raise SamuLMError(f"workers={workers}: {remedy}") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
