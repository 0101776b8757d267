"""Sources, tokenizers, packing, and the data module with its resumable position."""

from __future__ import annotations

from typing import Any

from samu_lm.data.batch import Batch, document_positions
from samu_lm.data.loader import PackedLoader
from samu_lm.data.module import ByteEntropy, LMDataModule, SplitSize
from samu_lm.data.packing import RowPlan, document_order, pack_documents, row_order
from samu_lm.data.presets import hub_data, jsonl_data, parquet_data, stdlib_data, text_data
from samu_lm.data.pretrained import PretrainedTokenizer
from samu_lm.data.records import HubSource, JsonlSource, ParquetSource
from samu_lm.data.sources import Source, StdlibSource, TextSource
from samu_lm.data.subwords import BPETokenizer
from samu_lm.data.tokenizers import ByteTokenizer, Tokenizer
from samu_lm.errors import ConfigError

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteEntropy",
    "ByteTokenizer",
    "HubSource",
    "JsonlSource",
    "LMDataModule",
    "PackedLoader",
    "ParquetSource",
    "PretrainedTokenizer",
    "RowPlan",
    "Source",
    "SplitSize",
    "StdlibSource",
    "TextSource",
    "Tokenizer",
    "document_order",
    "document_positions",
    "hub_data",
    "jsonl_data",
    "pack_documents",
    "parquet_data",
    "row_order",
    "stdlib_data",
    "text_data",
    "tokenizer_from_state",
]


def tokenizer_from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer that gave ``state``, e.g. a checkpoint's ``["samu_lm"]["tokenizer"]``.

    Raises:
        ConfigError: not a tokenizer's state.
    """
    kind = state.get("kind")
    tokenizer: Tokenizer
    if kind == ByteTokenizer.kind:
        tokenizer = ByteTokenizer()
    elif kind == BPETokenizer.kind:
        tokenizer = BPETokenizer(vocab_size=state["vocab_size"])
    elif kind == PretrainedTokenizer.kind:
        tokenizer = PretrainedTokenizer(path=state["path"])
    else:
        raise ConfigError(
            "tokenizer", kind, "the saved tokenizer is of no kind this version knows: bytes, bpe, pretrained"
        )
    tokenizer.load_state_dict(state)
    return tokenizer
