"""One function a source: the flat keys of ``configs/data/*.yaml`` become a data module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samu_lm.data.records import HubSource, JsonlSource, ParquetSource
from samu_lm.data.shards import ShardSource
from samu_lm.data.sources import Source, StdlibSource, TextSource
from samu_lm.data.tokenizers import Tokenizer

if TYPE_CHECKING:  # it needs PyTorch and Lightning, which preparing data does without
    from samu_lm.data.module import LMDataModule


def _module(source: Source, *arguments: Any) -> LMDataModule:
    from samu_lm.data.module import LMDataModule

    return LMDataModule(source, *arguments)


def stdlib_data(
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    packing: str = "concat",
    include_tests: bool = False,
    max_bytes: int | None = None,
) -> LMDataModule:
    """``data=stdlib``: see ``StdlibSource``; the other arguments are ``LMDataModule``'s."""
    source = StdlibSource(include_tests, max_bytes)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir, packing)


def text_data(
    tokenizer: Tokenizer,
    path: str | Sequence[str] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    packing: str = "concat",
    separator: str | None = None,
    newline: str = "lf",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=text``: see ``TextSource``; the other arguments are ``LMDataModule``'s."""
    source = TextSource(path, separator, newline, on_error)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir, packing)


def jsonl_data(
    tokenizer: Tokenizer,
    path: str | Sequence[str] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    packing: str = "concat",
    text_key: str = "text",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=jsonl``: see ``JsonlSource``; the other arguments are ``LMDataModule``'s."""
    source = JsonlSource(path, text_key, on_error)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir, packing)


def parquet_data(
    tokenizer: Tokenizer,
    path: str | Sequence[str] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    packing: str = "concat",
    text_key: str = "text",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=parquet``: see ``ParquetSource``; the other arguments are ``LMDataModule``'s."""
    source = ParquetSource(path, text_key, on_error)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir, packing)


def hub_data(
    tokenizer: Tokenizer,
    name: str | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    packing: str = "concat",
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_key: str = "text",
    on_error: str = "raise",
) -> LMDataModule:
    """``data=hub``: see ``HubSource``; the other arguments are ``LMDataModule``'s."""
    source = HubSource(name, config, split, revision, text_key, on_error)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir, packing)


def shards_data(
    tokenizer: Tokenizer,
    path: str | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    packing: str = "concat",
) -> LMDataModule:
    """``data=shards``: see ``ShardSource``; the other arguments are ``LMDataModule``'s."""
    source = ShardSource(path)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, None, packing)


def mixture_data(
    tokenizer: Tokenizer,
    sources: Mapping[str, Source] | None,
    weights: Mapping[str, float] | None,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    val_fraction: float = 0.05,
    num_workers: int = 0,
    cache_dir: str | None = None,
    packing: str = "concat",
) -> LMDataModule:
    """``data=mixture``: see ``MixtureSource``; the other arguments are ``LMDataModule``'s."""
    from samu_lm.data.mixture import MixtureSource

    source = MixtureSource(sources, weights)
    return _module(source, tokenizer, seq_len, batch_size, seed, val_fraction, num_workers, cache_dir, packing)


_PREPARED_FROM: dict[Callable[..., Any], Callable[..., Source]] = {
    stdlib_data: StdlibSource,
    text_data: TextSource,
    jsonl_data: JsonlSource,
    parquet_data: ParquetSource,
    hub_data: HubSource,
}


def source_of(preset: Callable[..., Any], settings: Mapping[str, Any]) -> Source | None:
    """The source that a preset would make of its settings; None where these are no texts to prepare shards from."""
    kind = _PREPARED_FROM.get(preset)
    if kind is None:
        return None
    names = inspect.signature(kind).parameters
    return kind(**{name: settings[name] for name in names})
