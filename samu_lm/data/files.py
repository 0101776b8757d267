"""Files of a corpus: from what the user wrote to a sorted list of regular files, opened whatever their compression."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import logging
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from samu_lm.errors import ConfigError

log = logging.getLogger(__name__)

COMPRESSIONS = (".gz", ".zst")


def launch_path(path: str | os.PathLike[str]) -> Path:
    """``path`` seen from the folder that the command was started in, whatever the run's working folder is now."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd

    base = get_original_cwd() if HydraConfig.initialized() else os.getcwd()
    return Path(base, Path(path).expanduser())


def find_files(key: str, path: str | Sequence[str] | None, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that ``path`` names: entries in the order given, the files of a folder or pattern sorted by path.

    Args:
        key: config key for the error, e.g. ``data.path``.
        path: a file, a folder (searched downwards, hidden entries left out), a glob (``**`` allowed), or a list of
            them.
        suffixes: endings that count in a folder, also with ``.gz`` or ``.zst`` behind; an empty tuple takes every file.

    Raises:
        ConfigError: nothing given, a missing path, no match, or a file that cannot be read.
    """
    if not path:
        raise ConfigError(key, path, "give a file, a folder, a glob such as 'data/*.txt', or a list of them")
    entries = [path] if isinstance(path, str | os.PathLike) else list(path)
    found: dict[Path, None] = {}  # a file named twice is read once
    for entry in entries:
        for file in _expand(key, str(entry), suffixes):
            found.setdefault(file)
    for file in found:
        _require_readable(key, file)
    return list(found)


def _expand(key: str, entry: str, suffixes: tuple[str, ...]) -> list[Path]:
    full = launch_path(entry)
    if full.is_dir():
        files = [f for f in _walk(full) if not suffixes or _ends_with(f.name, suffixes)]
        if not files:
            wanted = " or ".join(f"*{s}" for s in suffixes) or "file"
            raise ConfigError(key, entry, f"the folder holds no {wanted}; name another folder, a file or a glob")
        return files
    if full.exists() or full.is_symlink():
        return [full]
    if glob.has_magic(entry):
        files = sorted(p for p in map(Path, glob.glob(str(full), recursive=True)) if not p.is_dir())
        if not files:
            raise ConfigError(key, entry, f"no file matches {full}")
        return files
    raise ConfigError(key, entry, f"no such file or folder: {full}")


def _walk(folder: Path) -> list[Path]:
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda f: f.relative_to(folder).as_posix())


def _ends_with(name: str, suffixes: tuple[str, ...]) -> bool:
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return name.endswith(suffixes)


def _require_readable(key: str, file: Path) -> None:
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        raise ConfigError(key, file, f"cannot be read ({error.strerror})") from error
    if not regular:
        raise ConfigError(key, file, "not a regular file")  # a pipe would block for ever
    if not os.access(file, os.R_OK):
        raise ConfigError(key, file, "cannot be read (permission denied)")


@contextmanager
def open_binary(
    key: str, file: Path, opened: Callable[[Callable[[], int]], None] = lambda tell: None
) -> Iterator[BinaryIO]:
    """Opens a file for reading bytes, through gzip or zstd where its name ends so.

    Args:
        key: config key for the error.
        file: the file.
        opened: called with a function that gives the place in the file itself, compressed as it is.

    Raises:
        ConfigError: a file that cannot be read or decompressed, also while the caller reads.
    """
    try:
        if file.suffix == ".zst":
            import pyarrow as pa

            with pa.OSFile(str(file)) as raw, pa.CompressedInputStream(raw, "zstd") as unpacked:
                opened(raw.tell)
                yield io.BufferedReader(unpacked)
            return
        with open(file, "rb") as raw:
            opened(raw.tell)
            if file.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield stream  # type: ignore[misc]
            else:
                yield raw
    except ConfigError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(key, file, f"cannot be read ({error or type(error).__name__})") from error


def content_digest(key: str, files: Sequence[Path]) -> str:
    """Hash of the files' bytes, in order; names and times do not enter, so a copied corpus keeps its digest."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            with open(file, "rb") as stream:
                one = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
        except OSError as error:
            raise ConfigError(key, file, f"cannot be read ({error.strerror})") from error
        digest.update(one.digest())
    return digest.hexdigest()


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Holds a folder for this process alone.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # no such module on Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("out", folder, "another samu-lm prepare is writing there; wait for it") from None
        except OSError as error:  # some network file systems
            log.warning("out: no file locks there (%s); start no second preparation in %s", error.strerror, folder)
        yield
    finally:
        os.close(descriptor)
