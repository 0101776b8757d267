"""Reading token shards: the folder that `samu-lm prepare` writes, mapped into memory and never read as a whole.

manifest.json       what the folder holds: counts, sizes and hashes of the files, the tokenizer, the source
tokens-00000.bin    the documents' ids end to end, little-endian uint16 or uint32; a document lies in one file
offsets.npy         [N + 1] int64, where each document begins in the tokens of all files end to end
num_bytes.npy       [N] int64, bytes of each document's text
hashes.npy          [N] uint64, hash of each text, which decides whether it is held out
verified.json       size and times of the files when their hashes were last found right on this machine
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.files import launch_path
from samu_lm.data.restore import tokenizer_from_state
from samu_lm.data.sources import Source
from samu_lm.data.store import TokenStore
from samu_lm.data.tokenizers import Tokenizer
from samu_lm.errors import ConfigError

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, JOB, VERIFIED = "manifest.json", "job.json", "verified.json"
INDEX = {"offsets.npy": np.dtype("<i8"), "num_bytes.npy": np.dtype("<i8"), "hashes.npy": np.dtype("<u8")}
_ADVISE = hasattr(mmap, "MADV_WILLNEED")
_WORTH_ADVICE = 32  # tokens; for shorter pieces the call takes longer than it saves
PARTIAL = ".partial"  # behind the name of a file that is being written


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"tokens-{number:05d}.bin"


def file_hash(path: Path) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def manifest_text(content: Mapping[str, Any]) -> str:
    """A manifest as it is written, its own hash included."""
    plain = json.dumps(content, sort_keys=True)
    digest = hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "hash": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: str | None, key: str = "data.path") -> tuple[Path, dict[str, Any]]:
    """The folder of shards and its manifest.

    Raises:
        ConfigError: no such folder, no complete shards in it, or a manifest that was changed.
    """
    if not path:
        raise ConfigError(key, path, "give a folder that samu-lm prepare wrote")
    folder = launch_path(path)
    file = folder / MANIFEST
    if not folder.is_dir():
        raise ConfigError(key, path, f"no such folder: {folder}; write it with samu-lm prepare ... out={path}")
    if not file.exists():
        if (folder / JOB).exists():
            half = next((f.name for f in sorted(folder.glob(f"*{PARTIAL}"))), JOB)
            remedy = f"{folder / half} is half-written: samu-lm prepare has not finished; run the same command again"
            raise ConfigError(key, path, remedy)
        raise ConfigError(key, path, f"{folder} holds no {MANIFEST}; write it with samu-lm prepare ... out={path}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        digest = content.pop("hash")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        remedy = f"{file} cannot be read ({error}); restore it, or prepare the corpus again in another folder"
        raise ConfigError(key, path, remedy) from error
    if json.loads(manifest_text(content))["hash"] != digest:
        remedy = f"{file} was changed since it was written; restore it, or prepare the corpus again in another folder"
        raise ConfigError(key, path, remedy)
    if content["format"] != FORMAT:
        raise ConfigError(key, path, f"{file} has format {content['format']}, this version reads {FORMAT}")
    return folder, content


def file_stamp(path: Path) -> list[int]:
    """Size and times of a file: one that has the same as before has not been written to."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def verify(folder: Path, files: Mapping[str, Mapping[str, Any]], key: str = "data.path") -> None:
    """Compares files with the sizes and hashes noted of them.

    A file whose size and times are those of the last verification on this machine is not read again.

    Args:
        folder: where they lie.
        files: name to ``size`` in bytes and ``hash``.
        key: config key for the error.

    Raises:
        ConfigError: a file is missing, or differs; names it.
    """
    again = "restore it, or delete the folder and run samu-lm prepare again"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    stamps = {}
    for name, noted in files.items():
        path = folder / name
        try:
            stamps[name] = file_stamp(path)
            size = stamps[name][0]
            if size != noted["size"]:
                raise ConfigError(key, path, f"has {size} bytes and was written with {noted['size']}; {again}")
            if known.get(name) != [*stamps[name], noted["hash"]] and file_hash(path) != noted["hash"]:
                raise ConfigError(key, path, f"was changed since it was written (its hash differs); {again}")
        except OSError as error:
            raise ConfigError(key, path, f"cannot be read ({error.strerror}); {again}") from error
    verified = {name: [*stamp, files[name]["hash"]] for name, stamp in stamps.items()}
    if known != verified:
        _note(folder, verified)


def note_written(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Notes that files have the hashes of them, which were computed as they were written; arguments as ``verify``'s."""
    _note(folder, {name: [*file_stamp(folder / name), noted["hash"]] for name, noted in files.items()})


def _note(folder: Path, stamps: Mapping[str, list[Any]]) -> None:
    work = folder / f".{VERIFIED}.{os.getpid()}"
    try:
        work.write_text(json.dumps(stamps), encoding="utf-8")
        os.replace(work, folder / VERIFIED)
    except OSError as error:  # only costs the time of hashing
        log.info("%s cannot be written (%s): the shards are hashed again each time", folder / VERIFIED, error.strerror)


def _mapped(file: str, count: int) -> mmap.mmap:
    if not count:  # an empty file cannot be mapped
        return mmap.mmap(-1, mmap.PAGESIZE)
    with open(file, "rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if _ADVISE:
        mapped.madvise(mmap.MADV_RANDOM)  # documents come from anywhere: reading ahead would read others
    return mapped


class ShardTokens:
    """The tokens of shards as one array, mapped from the files.

    Args:
        files: the files in order.
        counts: tokens of each.
        dtype: type of a token, e.g. ``<u2``.
    """

    def __init__(self, files: Iterable[str], counts: Iterable[int], dtype: str) -> None:
        self.files, self.counts, self.dtype = list(files), list(counts), np.dtype(dtype)
        self.ends = np.cumsum(self.counts, dtype=np.int64)
        self._maps = [_mapped(file, count) for file, count in zip(self.files, self.counts, strict=True)]
        self._arrays: list[NDArray[Any]] = [np.frombuffer(mapped, dtype=self.dtype) for mapped in self._maps]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, self.counts, self.dtype.str)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Pieces of the tokens, none of which lies in two files.

        Raises:
            ConfigError: a file has lost tokens since it was opened; to read on there would end the process.
        """
        shard = np.searchsorted(self.ends, starts, side="right")
        for number in np.unique(shard).tolist():
            self._require_whole(number)
        begin = starts - (self.ends[shard] - np.array(self.counts, dtype=np.int64)[shard])
        every = list(zip(shard.tolist(), begin.tolist(), (begin + lengths).tolist(), strict=True))
        for number, first, last in every if _ADVISE else ():  # so that the disk works on all of them at once
            if last - first < _WORTH_ADVICE:
                continue
            page = first * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[number].madvise(mmap.MADV_WILLNEED, page, last * self.dtype.itemsize - page)
        return [self._arrays[number][first:last] for number, first, last in every]

    def _require_whole(self, number: int) -> None:
        file, size = self.files[number], self.counts[number] * self.dtype.itemsize
        try:
            found = os.stat(file).st_size
        except OSError as error:
            raise ConfigError("data.path", file, f"cannot be read any more ({error.strerror}); restore it") from error
        if found != size:
            raise ConfigError("data.path", file, f"has {found} bytes now and had {size} when it was opened; restore it")


class ShardSource(Source):
    """Documents that `samu-lm prepare` tokenized.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self.path = path
        self._content: tuple[Path, dict[str, Any]] | None = None

    def _manifest(self) -> tuple[Path, dict[str, Any]]:
        if self._content is None:
            self._content = read_manifest(self.path)
        return self._content

    def check(self) -> None:
        folder, manifest = self._manifest()
        for name, noted in manifest["files"].items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                remedy = f"cannot be read ({error.strerror}); restore it, or run samu-lm prepare again"
                raise ConfigError("data.path", folder / name, remedy) from error
            if size != noted["size"]:
                remedy = (
                    f"has {size} bytes and was written with {noted['size']}; restore it, or run samu-lm prepare again"
                )
                raise ConfigError("data.path", folder / name, remedy)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return tokenizer_from_state(self._manifest()[1]["tokenizer"])

    def tokenized(self) -> TokenStore:
        """The shards, after a comparison with the hashes in the manifest.

        Raises:
            ConfigError: a shard is missing or changed.
        """
        folder, manifest = self._manifest()
        verify(folder, manifest["files"])
        index = {name: np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in INDEX}
        shards = manifest["shards"]
        tokens = ShardTokens(
            [str(folder / shard["file"]) for shard in shards], [s["tokens"] for s in shards], manifest["dtype"]
        )
        return TokenStore(
            tokens,
            index["offsets.npy"],
            index["num_bytes.npy"],
            index["hashes.npy"],
            num_empty=manifest["empty"],
            num_skipped=manifest["skipped"],
        )

    def selected(self, documents: NDArray[Any]) -> Iterator[bytes]:
        """The texts that the tokens decode to."""
        store, tokenizer = self.tokenized(), self.tokenizer()
        for number in documents.tolist():
            ids = store.tokens.pieces(store.offsets[[number]], np.diff(store.offsets[number : number + 2]))[0]
            decode_bytes = getattr(tokenizer, "decode_bytes", None)
            yield decode_bytes(ids) if decode_bytes else tokenizer.decode(ids).encode()

    def documents(self) -> Iterator[bytes]:
        """The texts that the tokens decode to."""
        _, manifest = self._manifest()
        self.num_empty, self.num_skipped = manifest["empty"], manifest["skipped"]
        return self.selected(np.arange(manifest["documents"]))

    def _read(self, unit: Any, skip: int) -> Iterator[bytes | None]:
        raise NotImplementedError("shards are opened, not read record by record")

    def name(self) -> tuple[str, object]:
        return "data.path", self.path

    def fingerprint(self) -> str:
        return file_hash(self._manifest()[0] / MANIFEST)


def shard_tokenizer(path: str | None) -> Tokenizer:
    """``tokenizer=shards``: the tokenizer that shards were prepared with.

    Raises:
        ConfigError: no shards there.
    """
    return tokenizer_from_state(read_manifest(path, "tokenizer.path")[1]["tokenizer"])
