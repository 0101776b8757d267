"""Sources, tokenizers, packing, and the data module with its resumable position.

Names are imported when they are first used: preparing data in many processes then needs neither PyTorch nor Lightning,
which would take most of their memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samu_lm.data.batch import Batch, document_positions
    from samu_lm.data.corpus import SplitSize
    from samu_lm.data.loader import PackedLoader
    from samu_lm.data.mixture import MixtureSource
    from samu_lm.data.module import ByteEntropy, LMDataModule
    from samu_lm.data.packing import RowPlan, document_order, pack_documents, row_order
    from samu_lm.data.presets import (
        hub_data,
        jsonl_data,
        mixture_data,
        parquet_data,
        shards_data,
        stdlib_data,
        text_data,
    )
    from samu_lm.data.pretrained import PretrainedTokenizer
    from samu_lm.data.records import HubSource, JsonlSource, ParquetSource
    from samu_lm.data.restore import tokenizer_from_state
    from samu_lm.data.shards import ShardSource, shard_tokenizer
    from samu_lm.data.sources import Source, StdlibSource, TextSource
    from samu_lm.data.subwords import BPETokenizer
    from samu_lm.data.tokenizers import ByteTokenizer, Tokenizer

_MODULES = {
    "batch": ("Batch", "document_positions"),
    "corpus": ("SplitSize",),
    "loader": ("PackedLoader",),
    "mixture": ("MixtureSource",),
    "module": ("ByteEntropy", "LMDataModule"),
    "packing": ("RowPlan", "document_order", "pack_documents", "row_order"),
    "presets": ("hub_data", "jsonl_data", "mixture_data", "parquet_data", "shards_data", "stdlib_data", "text_data"),
    "pretrained": ("PretrainedTokenizer",),
    "records": ("HubSource", "JsonlSource", "ParquetSource"),
    "restore": ("tokenizer_from_state",),
    "shards": ("ShardSource", "shard_tokenizer"),
    "sources": ("Source", "StdlibSource", "TextSource"),
    "subwords": ("BPETokenizer",),
    "tokenizers": ("ByteTokenizer", "Tokenizer"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteEntropy",
    "ByteTokenizer",
    "HubSource",
    "JsonlSource",
    "LMDataModule",
    "MixtureSource",
    "PackedLoader",
    "ParquetSource",
    "PretrainedTokenizer",
    "RowPlan",
    "ShardSource",
    "Source",
    "SplitSize",
    "StdlibSource",
    "TextSource",
    "Tokenizer",
    "document_order",
    "document_positions",
    "hub_data",
    "jsonl_data",
    "mixture_data",
    "pack_documents",
    "parquet_data",
    "row_order",
    "shard_tokenizer",
    "shards_data",
    "stdlib_data",
    "text_data",
    "tokenizer_from_state",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
