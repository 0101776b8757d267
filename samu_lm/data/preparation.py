"""Writing token shards: one process reads, others tokenize, and the first writes what they return, in order.

Memory does not depend on the size of the corpus: texts are handed out in chunks of about a megabyte, and only a few
chunks for each process are under way. Everything written is a pure function of the corpus, the tokenizer and the size
of a shard. A shard that is finished is noted with the place in the corpus behind it (``parts/``), so that a run after a
kill goes on there; the manifest comes last and makes the folder readable.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from samu_lm.data.files import sole_writer
from samu_lm.data.shards import (
    FORMAT,
    INDEX,
    JOB,
    MANIFEST,
    PARTIAL,
    file_hash,
    file_stamp,
    manifest_text,
    note_written,
    read_manifest,
    shard_name,
    verify,
)
from samu_lm.data.sources import Place, Source
from samu_lm.data.store import train_tokenizer
from samu_lm.data.tokenizers import Tokenizer
from samu_lm.data.tokenizing import DOCUMENT, Chunk, Tokens, tokenized
from samu_lm.errors import ConfigError

PARTS = "parts"
_REPORT_SECONDS = 0.2
_BLOCK = 1 << 16


@dataclass
class Progress:
    """What has been done so far, for a report.

    Attributes:
        documents: documents written.
        bytes: bytes of their text.
        tokens: their tokens.
        resumed_bytes: of ``bytes``, those that an earlier run had written.
        read: how far the source is read, as `Source.progress`.
        reported: when the last report was made.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    resumed_bytes: int = 0
    read: tuple[int, int] | None = None
    reported: float = 0.0

    def add(self, tokens: Tokens, source: Source, report: Callable[[Progress], None]) -> None:
        """Counts a chunk, and reports from time to time."""
        self.documents += len(tokens.documents)
        self.bytes += int(tokens.documents["bytes"].sum())
        self.tokens += len(tokens.ids)
        if time.monotonic() - self.reported > _REPORT_SECONDS:
            self.read, self.reported = source.progress(), time.monotonic()
            report(self)


@dataclass
class _Part:
    """A shard, finished or being written."""

    number: int
    start: Place
    end: Place = (0, 0)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    empty: int = 0
    skipped: int = 0
    hashes: tuple[Any, Any] = field(default_factory=lambda: (_new_hash(), _new_hash()))

    def add(self, chunk: Chunk, tokens: Tokens, ids_file: BinaryIO, documents_file: BinaryIO) -> None:
        """Writes a chunk and counts it."""
        for content, file, digest in zip(tokens, (ids_file, documents_file), self.hashes, strict=True):
            plain = content.tobytes()
            file.write(plain)
            digest.update(plain)
        self.documents += len(tokens.documents)
        self.tokens += len(tokens.ids)
        self.bytes += int(tokens.documents["bytes"].sum())
        self.end, self.empty, self.skipped = chunk.end, self.empty + chunk.empty, self.skipped + chunk.skipped

    def record(self, size: int) -> dict[str, Any]:
        """What is noted of the finished shard, whose file has ``size`` bytes."""
        plain = {k: v for k, v in vars(self).items() if k != "hashes"}
        digests = dict(zip(("hash", "documents_hash"), (h.hexdigest() for h in self.hashes), strict=True))
        return plain | {"size": size} | digests


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def prepare_shards(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    workers: int,
    shard_tokens: int,
    val_fraction: float,
    report: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Tokenizes a corpus into a folder of shards, or goes on where an earlier run was stopped.

    Args:
        source: the corpus, checked.
        tokenizer: checked; one that is not trained is trained on the documents that ``val_fraction`` does not hold out.
        folder: where to write; new, empty, or of an earlier run of the same preparation.
        workers: processes that tokenize, besides this one, which reads and writes; 0: this one does all.
        shard_tokens: a shard ends with the chunk that brings it to so many tokens.
        val_fraction: as above; it does not split the shards.
        report: called every now and then.

    Returns:
        The manifest. A folder that is finished is verified and left as it is.

    Raises:
        ConfigError: the folder is another preparation's or cannot be written, a shard in it was changed, the corpus is
            empty or faulty.
        SamuLMError: a tokenizing process died.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with sole_writer(folder):
            job = _identity(source, tokenizer, shard_tokens, val_fraction)
            if (folder / MANIFEST).exists():
                return _finished(folder, job)
            _open_job(folder, job)
            _trained(folder, source, tokenizer, val_fraction)
            parts = _finished_parts(folder)
            _write_parts(folder, parts, source, tokenizer, workers, shard_tokens, report)
            manifest = _write_manifest(folder, parts, source, tokenizer, job)
            _clean(folder)
            note_written(folder, manifest["files"])
            return manifest
    except OSError as error:
        remedy = f"cannot be written ({error.strerror or error}); make room or choose another folder, then run it again"
        raise ConfigError("out", error.filename or folder, remedy) from error


# -- the folder -------------------------------------------------------------------------------------------------------


def _identity(source: Source, tokenizer: Tokenizer, shard_tokens: int, val_fraction: float) -> dict[str, Any]:
    """What decides the bytes of the shards."""
    identity: dict[str, Any] = {
        "format": FORMAT,
        "source": source.describe(),
        "tokenizer": tokenizer.fingerprint(),
        "shard_tokens": shard_tokens,
    }
    if not tokenizer.is_trained:
        identity["trained_without"] = val_fraction
    return identity


def _refuse_other_job(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    names = {"source": "data (source, options or files)", "trained_without": "data.val_fraction"}
    differing = [names.get(key, key) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
    if differing:
        remedy = (
            f"holds a preparation with other {', '.join(sorted(differing))}; choose another folder, or delete this one"
        )
        raise ConfigError("out", folder, remedy)


def _finished(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    _, manifest = read_manifest(str(folder), "out")
    _refuse_other_job(folder, manifest["job"] | {"source": manifest["source"]}, job)
    verify(folder, manifest["files"], "out")
    _clean(folder)
    return manifest


def _noted(file: Path) -> dict[str, Any]:
    """What an earlier run noted.

    Raises:
        ConfigError: the file does not hold it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content:
        raise ConfigError("out", file, "is damaged; delete the folder, or choose another, and run it again")
    return content


def _open_job(folder: Path, job: dict[str, Any]) -> None:
    file = folder / JOB
    if file.exists():
        _refuse_other_job(folder, _noted(file)["job"], job)
        return
    others = sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(PARTIAL))
    if others:
        raise ConfigError("out", folder, f"holds other files ({others[0]}); choose a new or an empty folder")
    (folder / PARTS).mkdir(exist_ok=True)
    _write_whole(file, json.dumps({"job": job}, indent=1).encode())


def _trained(folder: Path, source: Source, tokenizer: Tokenizer, val_fraction: float) -> None:
    """Trains the tokenizer where it must, once for all runs."""
    if tokenizer.is_trained:
        return
    file = folder / PARTS / "tokenizer.json"
    if file.exists():
        tokenizer.load_state_dict(_noted(file))
        return
    train_tokenizer(source, tokenizer, val_fraction)
    _write_whole(file, json.dumps(tokenizer.state_dict()).encode())


def _finished_parts(folder: Path) -> list[dict[str, Any]]:
    """Records of the shards that are finished, up to the first that is not.

    Raises:
        ConfigError: one was changed since.
    """
    parts: list[dict[str, Any]] = []
    while (record := folder / PARTS / f"{len(parts):05d}.json").exists():
        part = _noted(record)
        shard, documents = folder / shard_name(len(parts)), _documents_file(folder, len(parts))
        if not shard.exists():
            break
        stamp = file_stamp(shard)  # a shard that was not touched since is not read again
        for file, is_whole in (
            (shard, stamp == part["stamp"] or (stamp[0] == part["size"] and file_hash(shard) == part["hash"])),
            (documents, documents.exists() and file_hash(documents) == part["documents_hash"]),
        ):
            if not is_whole:
                remedy = f"was changed since it was written; delete {shard} to have it and those behind it made again"
                raise ConfigError("out", file, remedy)
        parts.append(part)
    return parts


def _documents_file(folder: Path, number: int) -> Path:
    return folder / PARTS / f"{number:05d}.documents"


def _clean(folder: Path) -> None:
    """Removes what only an unfinished preparation needs."""
    (folder / JOB).unlink(missing_ok=True)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    for leftover in folder.glob(f"*{PARTIAL}"):
        leftover.unlink()


def _write_whole(path: Path, content: bytes) -> None:
    """A file that is complete under its name, also after a loss of power."""
    work = path.with_name(path.name + PARTIAL)
    with open(work, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    _give_name(work, path)


def _give_name(work: Path, path: Path) -> None:
    os.replace(work, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- writing ----------------------------------------------------------------------------------------------------------


def _write_parts(
    folder: Path,
    parts: list[dict[str, Any]],
    source: Source,
    tokenizer: Tokenizer,
    workers: int,
    shard_tokens: int,
    report: Callable[[Progress], None],
) -> None:
    """Appends the records of the shards that are still to be written, and writes these."""
    progress = Progress(*(sum(part[key] for part in parts) for key in ("documents", "bytes", "tokens")))
    progress.resumed_bytes = progress.bytes
    if parts and parts[-1]["last"]:
        return
    start: Place = tuple(parts[-1]["end"]) if parts else (0, 0)
    with contextlib.closing(tokenized(source, start, tokenizer, workers)) as stream:
        following = next(stream, None)
        while following is not None:
            part = _Part(len(parts), start)
            shard, documents = folder / shard_name(part.number), _documents_file(folder, part.number)
            works = [file.with_name(file.name + PARTIAL) for file in (shard, documents)]
            with open(works[0], "wb") as ids_file, open(works[1], "wb") as documents_file:
                # A chunk without documents can only be the last; it makes no shard of its own.
                while following is not None and (part.tokens < shard_tokens or not len(following[1].documents)):
                    part.add(*following, ids_file, documents_file)
                    progress.add(following[1], source, report)
                    following = next(stream, None)
                for file in (ids_file, documents_file):
                    file.flush()
                    os.fsync(file.fileno())
            for work, path in zip(works, (shard, documents), strict=True):
                _give_name(work, path)
            stamp = file_stamp(shard)
            record = part.record(stamp[0]) | {"stamp": stamp, "last": following is None}
            _write_whole(folder / PARTS / f"{part.number:05d}.json", json.dumps(record).encode())
            parts.append(record)
            start = part.end


def _write_manifest(
    folder: Path, parts: list[dict[str, Any]], source: Source, tokenizer: Tokenizer, job: dict[str, Any]
) -> dict[str, Any]:
    total = {key: sum(part[key] for part in parts) for key in ("documents", "tokens", "bytes", "empty", "skipped")}
    if not total["documents"]:
        left_out = f"{total['empty']} empty and {total['skipped']} faulty documents were left out"
        key, value = source.name()
        raise ConfigError(key, value, f"the corpus is empty: it has no document with text ({left_out})")
    files = {shard_name(part["number"]): {"size": part["size"], "hash": part["hash"]} for part in parts}
    for name, dtype in INDEX.items():
        _write_index(folder, name, dtype, len(parts), total["documents"])
        files[name] = {"size": (folder / name).stat().st_size, "hash": file_hash(folder / name)}
    manifest = {
        "format": FORMAT,
        **total,
        "tokenizer": tokenizer.state_dict(),
        "dtype": np.dtype(tokenizer.dtype).newbyteorder("<").str,
        "source": job["source"],
        "job": {key: value for key, value in job.items() if key != "source"},
        "shards": [
            {"file": shard_name(part["number"]), **{key: part[key] for key in ("documents", "tokens", "bytes")}}
            for part in parts
        ],
        "files": files,
    }
    _write_whole(folder / MANIFEST, manifest_text(manifest).encode())
    return manifest


def _write_index(folder: Path, name: str, dtype: np.dtype[Any], parts: int, documents: int) -> None:
    """One of the arrays over all documents, block by block."""
    column = {"offsets.npy": "tokens", "num_bytes.npy": "bytes", "hashes.npy": "hash"}[name]
    work = folder / (name + PARTIAL)
    with open(work, "wb") as out:
        length = documents + (column == "tokens")
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(out, header)
        total = 0
        if column == "tokens":
            out.write(np.zeros(1, dtype=dtype).tobytes())
        for number in range(parts):
            with open(_documents_file(folder, number), "rb") as stream:
                while block := stream.read(_BLOCK * DOCUMENT.itemsize):
                    values = np.frombuffer(block, dtype=DOCUMENT)[column].astype(dtype)
                    if column == "tokens":
                        values = total + np.cumsum(values, dtype=dtype)
                        total = int(values[-1])
                    out.write(values.tobytes())
        out.flush()
        os.fsync(out.fileno())
    _give_name(work, folder / name)
