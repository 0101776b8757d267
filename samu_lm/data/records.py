"""Sources whose documents are records with a text field: JSON lines, Parquet, and the Hugging Face hub."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samu_lm.data.files import launch_path
from samu_lm.data.sources import BOM, FileSource, Source
from samu_lm.errors import ConfigError

_ROWS = 1024


def _check_text_key(text_key: object) -> None:
    if not isinstance(text_key, str) or not text_key:
        raise ConfigError("data.text_key", text_key, "give the name of the field that holds a document's text")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


class JsonlSource(FileSource):
    """JSON lines: each line an object, its ``text_key`` a document, exactly as written there.

    Lines of white space alone are no documents. A line that is no JSON object, lacks the key, or holds anything but a
    string there is a fault.

    Args:
        path: a file, folder (``*.jsonl``, ``*.ndjson``, ``*.json``), glob, or a list of them.
        text_key: the field with the text.
        on_error: "raise" (names file and line) or "skip" (counts the line).
    """

    suffixes = (".jsonl", ".ndjson", ".json")

    def __init__(self, path: str | Sequence[str] | None, text_key: str = "text", on_error: str = "raise") -> None:
        super().__init__(path, on_error)
        self.text_key = text_key

    def check(self) -> None:
        _check_text_key(self.text_key)
        super().check()
        if self.on_error == "raise":
            self._check_first_line()

    def _check_first_line(self) -> None:
        # A wrong text_key is the commonest mistake; the first line shows it, with the keys there are.
        first = itertools.chain.from_iterable(map(self._lines, self.files()))
        for file, number, line in itertools.islice(first, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                return  # reported with the reason when the corpus is read
            if isinstance(record, dict) and self.text_key not in record:
                have = _names(list(record)) or "none"
                raise ConfigError("data.text_key", self.text_key, f"{file}:{number} has no such key; its keys: {have}")

    def _lines(self, file: Path) -> Iterator[tuple[Path, int, bytes]]:
        with self._open(file) as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(BOM)
                if not line.isspace() and line:
                    yield file, number, line

    def _read(self, unit: Path, skip: int) -> Iterator[bytes | None]:
        for _, number, line in itertools.islice(self._lines(unit), skip, None):
            yield self._text(line, unit, number)

    def _text(self, line: bytes, file: Path, number: int) -> bytes | None:
        place, key = f"{file}:{number}", self.text_key
        if not self._is_utf8(line, file, number):
            return None
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            self._fault(place, f"not JSON ({error}); write one object a line")
            return None
        if not isinstance(record, dict):
            self._fault(place, f"a JSON {type(record).__name__}, not an object; write one object a line")
            return None
        if key not in record:
            self._fault(place, f'the object has no "{key}" (its keys: {_names(list(record))}); set data.text_key')
            return None
        value = record[key]
        if not isinstance(value, str):
            found = "null" if value is None else type(value).__name__
            self._fault(place, f'"{key}" is {found}, not a string; give it text')
            return None
        try:
            return value.encode()
        except UnicodeEncodeError:
            self._fault(place, f'"{key}" holds half of a surrogate pair, which is no character; correct it')
            return None


class ParquetSource(FileSource):
    """Parquet files: each row's ``text_key`` column is a document. A null is a fault.

    Args:
        path: a file, folder (``*.parquet``), glob, or a list of them.
        text_key: the column with the text, of a string or binary type.
        on_error: "raise" (names file and row, counted from 1) or "skip" (counts the row).
    """

    suffixes = (".parquet",)

    def __init__(self, path: str | Sequence[str] | None, text_key: str = "text", on_error: str = "raise") -> None:
        super().__init__(path, on_error)
        self.text_key = text_key

    def check(self) -> None:
        _check_text_key(self.text_key)
        super().check()
        for file in self.files():
            self._parquet(file).close()  # reads the schema only

    def _parquet(self, file: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            parquet = pq.ParquetFile(file)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError("data.path", file, f"not a readable Parquet file ({error})") from error
        schema = parquet.schema_arrow
        if self.text_key not in schema.names:
            have = _names(schema.names)
            raise ConfigError("data.text_key", self.text_key, f"{file} has no such column; its columns: {have}")
        kind = schema.field(self.text_key).type
        texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        if not any(is_text(kind) for is_text in texts):
            raise ConfigError("data.text_key", self.text_key, f"{file} holds {kind} there; name a column of strings")
        return parquet

    def _read(self, unit: Path, skip: int) -> Iterator[bytes | None]:
        import pyarrow as pa

        with self._parquet(unit) as parquet:
            ends = list(
                itertools.accumulate(parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups))
            )
            groups = [g for g, end in enumerate(ends) if end > skip]
            number = ends[groups[0] - 1] if groups and groups[0] else 0
            size, rows = unit.stat().st_size, max(1, parquet.metadata.num_rows)
            self._now_reads(unit, lambda: size * number // rows)
            try:
                for batch in parquet.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[self.text_key]):
                    # as bytes: a broken string would stop the whole column's conversion to str
                    for text in batch.column(0).cast(pa.large_binary()).to_pylist():
                        number += 1
                        if number > skip:
                            yield text if self._is_text(text, unit, number) else None
            except (OSError, pa.ArrowException) as error:
                raise ConfigError("data.path", unit, f"cannot be read after row {number} ({error})") from error

    def _is_text(self, text: bytes | None, file: Path, number: int) -> bool:
        if text is None:
            self._fault(f"{file} row {number}", f'"{self.text_key}" is null; give it text')
            return False
        try:
            text.decode()
        except UnicodeDecodeError as error:
            byte = text[error.start]
            self._fault(f"{file} row {number}", f'byte 0x{byte:02x} of "{self.text_key}" is not UTF-8; correct it')
            return False
        return True


class HubSource(Source):
    """A dataset of the Hugging Face hub (or a local one) through ``datasets``, downloaded when first read.

    Args:
        name: its name, ``owner/name``, or a local folder.
        config: its configuration, where it has several.
        split: the split to read, also a slice such as ``train[:1%]``.
        revision: commit or tag, so that a later run reads the same.
        text_key: the column with the text.
        on_error: "raise" or "skip" for a row whose text is null.
    """

    def __init__(
        self,
        name: str | None,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        text_key: str = "text",
        on_error: str = "raise",
    ) -> None:
        super().__init__(on_error)
        self.dataset, self.config, self.split, self.revision, self.text_key = name, config, split, revision, text_key
        self._loaded: Any = None
        self._rows_read = 0

    def check(self) -> None:
        super().check()
        _check_text_key(self.text_key)
        if not self.dataset:
            raise ConfigError(
                "data.name", self.dataset, "give a dataset of the hub, e.g. data.name=roneneldan/TinyStories"
            )
        if not self.split:
            raise ConfigError("data.split", self.split, "name one split, e.g. data.split=train")
        try:
            import datasets  # noqa: F401
        except ImportError as error:
            remedy = "needs the package datasets: pip install 'samu-lm[hub]'"
            raise ConfigError("data.name", self.dataset, remedy) from error

    def name(self) -> tuple[str, object]:
        return "data.name", self.dataset

    def _load(self) -> Any:
        if self._loaded is None:
            import datasets

            local = launch_path(str(self.dataset))
            try:
                data = datasets.load_dataset(
                    str(local) if local.is_dir() else str(self.dataset),
                    self.config,
                    split=self.split,
                    revision=None if local.is_dir() else self.revision,
                )
            except Exception as error:  # datasets raises every kind, from its own to those of the HTTP client
                lines = str(error).strip().splitlines() or [type(error).__name__]
                remedy = f"datasets cannot load it ({lines[0]}); check data.config, data.split, data.revision"
                raise ConfigError("data.name", self.dataset, remedy) from error
            if self.text_key not in data.column_names:
                have = _names(data.column_names)
                raise ConfigError("data.text_key", self.text_key, f"{self.dataset} has no such column; it has: {have}")
            self._loaded = data.select_columns([self.text_key])
        return self._loaded

    def describe(self) -> dict[str, Any]:
        """By the fingerprint that ``datasets`` gives to data and what was done to it."""
        own = ("dataset", "config", "split", "revision", "text_key", "on_error")
        return (
            super().describe() | {key: getattr(self, key) for key in own} | {"fingerprint": self._load()._fingerprint}
        )

    def progress(self) -> tuple[int, int]:
        """Rows."""
        return self._rows_read, len(self._load())

    def _read(self, unit: Any, skip: int) -> Iterator[bytes | None]:
        data = self._load()
        self._rows_read = skip
        for rows in (data.select(range(skip, len(data))) if skip else data).iter(batch_size=_ROWS):
            for text in rows[self.text_key]:
                self._rows_read += 1
                if isinstance(text, str):
                    yield text.encode()
                    continue
                problem = f'"{self.text_key}" is {"null" if text is None else type(text).__name__}; it must be text'
                self._fault(f"{self.dataset} row {self._rows_read}", problem, key="data.name")
                yield None
