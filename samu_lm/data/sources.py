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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from numpy.typing import NDArray

from samu_lm.data.files import content_digest, find_files, open_binary
from samu_lm.errors import ConfigError

Place = tuple[int, int]  # of a record: the unit (mostly a file), and how many of its records came up to this one

if TYPE_CHECKING:
    from samu_lm.data.store import TokenStore
    from samu_lm.data.tokenizers import Tokenizer

BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 24
_ESCAPES = {b"\\n": b"\n", b"\\r": b"\r", b"\\t": b"\t"}
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Source(ABC):
    """A corpus. ``documents()`` may be called again and yields the same documents. A record is a document that may be
    empty or faulty.

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
        for _, text in self.records():
            if text:
                yield text
            elif text is not None:
                self.num_empty += 1

    def records(self, start: Place = (0, 0)) -> Iterator[tuple[Place, bytes | None]]:
        """Every record from a place on, with the place behind it; None where ``on_error=skip`` leaves it out.

        Args:
            start: as a record came with, to go on behind it; whole files are left out without reading them.

        Raises:
            ConfigError: as ``documents``.
        """
        first, skip = start
        for number, unit in enumerate(self.units()):
            if number < first:
                continue
            for index, text in enumerate(self._read(unit, skip), start=skip + 1):
                yield (number, index), text
            skip = 0

    def units(self) -> Sequence[Any]:
        """What is read one after another: files, or one whole."""
        return [None]

    @abstractmethod
    def _read(self, unit: Any, skip: int) -> Iterator[bytes | None]:
        """The records of a unit from number ``skip`` on, empty texts too; None for one that ``_fault`` counted."""

    def parts(self) -> dict[str, Source]:
        """The sources that this one mixes; itself alone, without a name, where it mixes none."""
        return {"": self}

    def weights(self) -> list[int] | None:
        """The weights of a mixture's parts, whole numbers without a common divisor; None for no mixture."""
        return None

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens, where the source has tokens already; None where it has texts."""
        return None

    def tokenized(self) -> TokenStore | None:
        """The documents' tokens where the source has them already; None where they are to be made of its texts."""
        return None

    def selected(self, documents: NDArray[Any]) -> Iterator[bytes]:
        """The documents of these numbers, which rise."""
        wanted = iter(documents.tolist())
        following = next(wanted, None)
        for number, text in enumerate(self.documents()):
            if following is None:
                return
            if number == following:
                yield text
                following = next(wanted, None)

    def progress(self) -> tuple[int, int] | None:
        """How far ``records`` has read and how far it has to go, in the same unit; None where that is not known."""
        return None

    def describe(self) -> dict[str, Any]:
        """Kind, options and files, as plain values: equal where another reading gives the same records."""
        return {"kind": type(self).__name__}

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


def _stamps(files: Iterable[Path]) -> list[dict[str, Any]]:
    found = [(file, file.stat()) for file in files]
    return [{"path": str(file), "size": stat.st_size, "modified_ns": stat.st_mtime_ns} for file, stat in found]


class FileSource(Source):
    """A corpus of files named by ``data.path``."""

    suffixes: tuple[str, ...] = ()

    def __init__(self, path: str | Sequence[str] | None, on_error: str = "raise") -> None:
        super().__init__(on_error)
        self.path = path if path is None or isinstance(path, str) else [str(p) for p in path]
        self._reading: tuple[Path, Callable[[], int]] | None = None
        self._sizes: dict[Path, int] = {}

    def units(self) -> list[Path]:
        files = self.files()
        self._sizes = {file: file.stat().st_size for file in files}
        return files

    def _open(self, file: Path) -> AbstractContextManager[BinaryIO]:
        return open_binary("data.path", file, lambda tell: self._now_reads(file, tell))

    def _now_reads(self, file: Path, tell: Callable[[], int]) -> None:
        self._reading = file, tell

    def progress(self) -> tuple[int, int]:
        """Bytes of the files, compressed as they are."""
        total = sum(self._sizes.values())
        if self._reading is None:
            return 0, total
        file, tell = self._reading
        try:
            inside = tell()
        except ValueError:  # closed: read to its end
            inside = self._sizes[file]
        before = itertools.takewhile(lambda other: other != file, self._sizes)
        return sum(self._sizes[other] for other in before) + inside, total

    def describe(self) -> dict[str, Any]:
        return super().describe() | self._options() | {"files": _stamps(self.files())}

    def _options(self) -> dict[str, Any]:
        left_out = ("path", "num_empty", "num_skipped", "_reading", "_sizes")
        return {key: value for key, value in sorted(vars(self).items()) if key not in left_out}

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
        return f"{type(self).__name__}{list(self._options().items())}{content_digest('data.path', self.files())}"


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

    def units(self) -> list[Path]:
        return self.files()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"files": _stamps(self.files())}

    def _read(self, unit: Path, skip: int) -> Iterator[bytes | None]:
        if skip:
            return
        with open_binary("data", unit) as stream:
            text = stream.read().removeprefix(BOM).replace(b"\r\n", b"\n")
        yield text if self._is_utf8(text, unit) else None


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

    def _read(self, unit: Path, skip: int) -> Iterator[bytes | None]:
        separator = None
        if self.separator is not None:
            separator = self.separator.encode()
            for typed, meant in _ESCAPES.items():
                separator = separator.replace(typed, meant)
        elif skip:
            return
        with self._open(unit) as stream:
            for text, line in itertools.islice(split_documents(stream, separator, self.newline == "lf"), skip, None):
                yield text if self._is_utf8(text, unit, line) else None


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
