"""Where documents come from: the base of all sources, the standard library, and text files.

A source yields documents as UTF-8 bytes, in the same order at each call, and counts what it left out. Sources with
records (JSON lines, Parquet, the Hugging Face hub) are in ``records.py``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from samu_lm.data.files import content_digest, find_files, open_binary
from samu_lm.errors import ConfigError

BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 24
_ESCAPES = {b"\\n": b"\n", b"\\r": b"\r", b"\\t": b"\t"}
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Source(ABC):
    """A corpus. ``documents()`` may be called again and yields the same documents.

    Attributes:
        num_empty: documents without text that the last ``documents()`` left out.
        num_skipped: faulty documents that it left out because of ``on_error=skip``.
    """

    def __init__(self, on_error: str = "raise") -> None:
        self.on_error = on_error
        self.num_empty = 0
        self.num_skipped = 0

    def check(self) -> None:
        """Everything that can be refused without reading the corpus.

        Raises:
            ConfigError: names the key.
        """
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(
                "data.on_error", self.on_error, "choose raise (stop at a fault) or skip (count and go on)"
            )

    def documents(self) -> Iterator[bytes]:
        """The documents with text, each valid UTF-8, in a fixed order.

        Raises:
            ConfigError: a faulty document, by file and line, unless ``on_error=skip``.
        """
        self.num_empty = self.num_skipped = 0
        for text in self._read():
            if text:
                yield text
            else:
                self.num_empty += 1

    @abstractmethod
    def _read(self) -> Iterator[bytes]: ...

    @abstractmethod
    def name(self) -> tuple[str, object]:
        """Key and value that name this corpus in an error."""

    def fingerprint(self) -> str:
        """Hash of the documents; by default it reads them."""
        digest = hashlib.blake2b(digest_size=16)
        for text in self.documents():
            digest.update(len(text).to_bytes(8, "little") + text)
        return digest.hexdigest()

    def _fault(self, place: str, problem: str, key: str = "data.path") -> None:
        if self.on_error != "skip":
            raise ConfigError(key, place, f"{problem}, or set data.on_error=skip to leave such documents out")
        self.num_skipped += 1

    def _is_utf8(self, text: bytes, file: Path, first_line: int = 1) -> bool:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            line = first_line + text.count(b"\n", 0, error.start)
            byte = text[error.start]
            self._fault(f"{file}:{line}", f"byte 0x{byte:02x} is not UTF-8; convert the file to UTF-8")
            return False
        return True


class FileSource(Source):
    """A corpus of files named by ``data.path``."""

    suffixes: tuple[str, ...] = ()

    def __init__(self, path: str | Sequence[str] | None, on_error: str = "raise") -> None:
        super().__init__(on_error)
        self.path = path if path is None or isinstance(path, str) else [str(p) for p in path]

    def files(self) -> list[Path]:
        """The corpus' files, in reading order."""
        return find_files("data.path", self.path, self.suffixes)

    def check(self) -> None:
        super().check()
        if not any(file.stat().st_size for file in self.files()):
            raise ConfigError("data.path", self.path, "the corpus is empty: every file there has 0 bytes")

    def name(self) -> tuple[str, object]:
        return "data.path", self.path

    def fingerprint(self) -> str:
        options = sorted((k, v) for k, v in vars(self).items() if k not in ("path", "num_empty", "num_skipped"))
        return f"{type(self).__name__}{options}{content_digest('data.path', self.files())}"


class StdlibSource(Source):
    """The running Python's own standard library: each ``.py`` file is a document, in order of its relative path.

    The corpus differs between Python versions. Files that are not UTF-8 (a few tests of encodings) are counted as
    skipped.

    Args:
        include_tests: the library's tests too (more than twice the text).
        max_bytes: take files only up to so many bytes in all, chosen by a hash of their paths, so that a small
            corpus is no alphabetical slice (at least one file). None takes all.
    """

    def __init__(self, include_tests: bool = False, max_bytes: int | None = None) -> None:
        super().__init__("skip")
        self.include_tests = include_tests
        self.max_bytes = max_bytes

    def check(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError("data.max_bytes", self.max_bytes, "give a positive number of bytes, or null for no limit")
        if not self.files():
            raise ConfigError("data", "stdlib", f"no .py file under {self._root()}; use data=text with data.path")

    def name(self) -> tuple[str, object]:
        return "data", "stdlib"

    def _root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[Path]:
        """The library's files, sorted by path."""
        root, found = self._root(), []
        for folder, folders, names in os.walk(root):
            left_out = _NOT_STDLIB if self.include_tests else _NOT_STDLIB | _TEST_FOLDERS
            folders[:] = [f for f in folders if f not in left_out]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        found.sort(key=lambda f: f.relative_to(root).as_posix())
        if self.max_bytes is None:
            return found
        chosen: set[Path] = set()
        total = 0
        for file in sorted(found, key=lambda f: hashlib.blake2b(f.relative_to(root).as_posix().encode()).digest()):
            total += file.stat().st_size
            if total > self.max_bytes and chosen:
                break
            chosen.add(file)
        return [file for file in found if file in chosen]

    def _read(self) -> Iterator[bytes]:
        for file in self.files():
            with open_binary("data", file) as stream:
                text = stream.read().removeprefix(BOM).replace(b"\r\n", b"\n")
            if self._is_utf8(text, file):
                yield text


class TextSource(FileSource):
    """Text files, one document a file, or several between separators.

    A byte order mark at a file's start is dropped. ``newline`` "lf" turns CRLF into LF (before documents are
    separated), "keep" leaves every byte as it is.

    Args:
        path: a file, folder, glob, or a list of them; every file of a folder counts.
        separator: ends a document within a file and belongs to none, e.g. ``\\n\\n`` or ``<|endoftext|>``; the escapes
            ``\\n \\r \\t`` may be typed as two characters. None: a file is a document.
        newline: "lf" or "keep".
        on_error: what to do with a document that is not UTF-8: "raise" (names file and line) or "skip" (counts it).
    """

    def __init__(
        self,
        path: str | Sequence[str] | None,
        separator: str | None = None,
        newline: str = "lf",
        on_error: str = "raise",
    ) -> None:
        super().__init__(path, on_error)
        self.separator = separator
        self.newline = newline

    def check(self) -> None:
        if self.newline not in ("lf", "keep"):
            raise ConfigError("data.newline", self.newline, "choose lf (CRLF becomes LF) or keep (every byte as it is)")
        if self.separator == "":
            raise ConfigError("data.separator", "''", "give at least one character, or null for one document a file")
        super().check()

    def _read(self) -> Iterator[bytes]:
        separator = None
        if self.separator is not None:
            separator = self.separator.encode()
            for typed, meant in _ESCAPES.items():
                separator = separator.replace(typed, meant)
        for file in self.files():
            with open_binary("data.path", file) as stream:
                for text, line in split_documents(stream, separator, self.newline == "lf"):
                    if self._is_utf8(text, file, line):
                        yield text


def split_documents(
    stream: BinaryIO, separator: bytes | None, to_lf: bool, block: int = _BLOCK
) -> Iterator[tuple[bytes, int]]:
    """Documents of a file and the line each begins on; holds one document and one block in memory.

    A separator at the end of the file ends the last document and begins no empty one; an empty file is an empty
    document.
    """
    buffer, line, searched, separated = bytearray(), 1, 0, False
    held = b""  # a CR at a block's end, until it is known whether LF follows
    for data in itertools.chain([stream.read(len(BOM)).removeprefix(BOM)], iter(lambda: stream.read(block), b"")):
        data, held = held + data, b""
        if to_lf:
            if data.endswith(b"\r"):
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n")
        buffer += data
        while separator is not None and (end := buffer.find(separator, searched)) >= 0:
            yield bytes(buffer[:end]), line
            separated = True
            line += buffer.count(b"\n", 0, end + len(separator))
            del buffer[: end + len(separator)]
            searched = 0
        searched = max(0, len(buffer) - len(separator or b"") + 1)
    buffer += held
    if buffer or not separated:
        yield bytes(buffer), line
