"""What the tests of shards share."""

import gzip
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from samu_lm.data import ByteTokenizer, HubSource, JsonlSource, ParquetSource, StdlibSource, TextSource, tokenizing
from samu_lm.data.preparation import prepare_shards


def texts(count, seed=0, longest=60):
    """Texts that are all different and not all ASCII, one of them empty."""
    rng = np.random.default_rng(seed)
    made = [f"document {i} " + "été " * int(rng.integers(0, longest // 4)) for i in range(count)]
    made[count // 2] = ""
    return made


def jsonl(path, documents):
    """JSON lines, compressed as the name says."""
    data = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
    return path


def sources(folder):
    """One corpus of uneven files for each kind of source, by name; each call makes new sources of the same corpora."""
    documents = texts(60)
    corpora = {"jsonl": folder / "jsonl", "text": folder / "text", "parquet": folder / "parquet", "hub": folder / "hub"}
    if not folder.exists():
        for path in corpora.values():
            path.mkdir(parents=True)
        jsonl(corpora["jsonl"] / "a.jsonl.gz", documents[:7])
        (corpora["jsonl"] / "b.jsonl").write_bytes(b"")
        jsonl(corpora["jsonl"] / "c.jsonl.zst", [*documents[7:50]])
        (corpora["jsonl"] / "d.jsonl").write_text('\n[1]\n{"text": "last"}\n')
        (corpora["text"] / "a.txt").write_text(";".join(documents[:40]))
        (corpora["text"] / "b.txt").write_text("whole;")
        pq.write_table(pa.table({"text": documents[:45]}), corpora["parquet"] / "a.parquet", row_group_size=10)
        pq.write_table(pa.table({"text": [None, *documents[45:]]}), corpora["parquet"] / "b.parquet")
        jsonl(corpora["hub"] / "train.jsonl", documents)
    return {
        "jsonl": JsonlSource(str(corpora["jsonl"]), on_error="skip"),
        "text": TextSource(str(corpora["text"]), separator=";"),
        "parquet": ParquetSource(str(corpora["parquet"]), on_error="skip"),
        "hub": HubSource(str(corpora["hub"])),
        "stdlib": StdlibSource(max_bytes=60_000),
    }


def prepare(source, folder, tokenizer=None, workers=0, shard_tokens=400, chunk_bytes=150, **options):
    """Shards of a source, small ones of small chunks."""
    source.check()
    options = {"val_fraction": 0.2, **options}
    options |= {"workers": workers, "shard_tokens": shard_tokens}
    with mock.patch.object(tokenizing, "_CHUNK_BYTES", chunk_bytes):
        return prepare_shards(source, tokenizer or ByteTokenizer(), Path(folder), **options)


def contents(folder):
    """Every file of a folder of shards but the note of this machine's verification."""
    return {f.name: f.read_bytes() for f in sorted(Path(folder).iterdir()) if f.name != "verified.json"}
