"""One function a source: the flat keys of ``configs/data/*.yaml`` become a data module."""

from __future__ import annotations

from collections.abc import Sequence

from samu_lm.data.module import LMDataModule
from samu_lm.data.records import HubSource, JsonlSource, ParquetSource
from samu_lm.data.sources import StdlibSource, TextSource
from samu_lm.data.tokenizers import Tokenizer


def stdlib_data(
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    include_tests: bool = False,
    max_bytes: int | None = None,
) -> LMDataModule:
    """``data=stdlib``: see ``StdlibSource``; the other arguments are ``LMDataModule``'s."""
    source = StdlibSource(include_tests, max_bytes)
    return LMDataModule(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir)


def text_data(
    tokenizer: Tokenizer,
    path: str | Sequence[str] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    separator: str | None = None,
    newline: str = "lf",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=text``: see ``TextSource``; the other arguments are ``LMDataModule``'s."""
    source = TextSource(path, separator, newline, on_error)
    return LMDataModule(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir)


def jsonl_data(
    tokenizer: Tokenizer,
    path: str | Sequence[str] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    text_key: str = "text",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=jsonl``: see ``JsonlSource``; the other arguments are ``LMDataModule``'s."""
    source = JsonlSource(path, text_key, on_error)
    return LMDataModule(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir)


def parquet_data(
    tokenizer: Tokenizer,
    path: str | Sequence[str] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    text_key: str = "text",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=parquet``: see ``ParquetSource``; the other arguments are ``LMDataModule``'s."""
    source = ParquetSource(path, text_key, on_error)
    return LMDataModule(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir)


def hub_data(
    tokenizer: Tokenizer,
    name: str | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_key: str = "text",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=hub``: see ``HubSource``; the other arguments are ``LMDataModule``'s."""
    source = HubSource(name, config, split, revision, text_key, on_error)
    return LMDataModule(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir)
