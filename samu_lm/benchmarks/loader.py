"""How many tokens a second the loader serves from shards.

    samu-lm prepare ... out=shards
    python -m samu_lm.benchmarks.loader shards --output loader.json

Rows are read from random places of the whole folder, as in training; once from files that the system may hold in
memory, once from files that it has to read from the disk ("cold"). With ``workers`` 0 the rows are made in this
process; otherwise in so many others, from which batches come through a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samu_lm.data import LMDataModule, ShardSource
from samu_lm.environment import environment


def measure(
    folder: str,
    *,
    seq_len: int,
    batch_size: int,
    packing: str,
    workers: int,
    seconds: float,
    cold: bool = False,
    warmup: int = 4,
) -> dict[str, Any]:
    """Speed of the training loader over one epoch or some seconds of it, whichever is shorter.

    Args:
        folder: shards.
        seq_len: tokens a row.
        batch_size: rows a batch.
        packing: "concat" or "best_fit".
        workers: processes that make batches; 0: this one.
        seconds: how long to read.
        cold: first drop the files from the system's memory, as where a corpus is far larger than that.
        warmup: batches that are not counted, while processes start and files are opened.

    Returns:
        Row tokens a second of wall time, and of this process' own processor time (of all work where ``workers`` is 0).
    """
    source = ShardSource(folder)
    tokenizer = source.tokenizer()
    data = LMDataModule(source, tokenizer, seq_len, batch_size, num_workers=workers, packing=packing)
    data.setup()
    for file in sorted(Path(folder).iterdir()) if cold else ():
        with open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    batches = iter(data.train_dataloader())
    for _ in range(warmup):
        next(batches)
    began, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        tokens += batch.tokens.numel()
        if time.perf_counter() - began > seconds:
            break
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {
        "packing": packing,
        "cold": cold,
        "workers": workers,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "row_tokens": tokens,
        "seconds": wall,
        "tokens_per_second": tokens / wall,
        "tokens_per_processor_second_of_this_process": tokens / cpu,
        "documents": data.num_train_documents,
        "tokens_of_the_corpus": data.num_train_tokens,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both packings with several numbers of workers; prints and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m samu_lm.benchmarks.loader", description=__doc__)
    parser.add_argument("folder", help="shards that samu-lm prepare wrote")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path, help="file to write the JSON to")
    args = parser.parse_args(argv)
    results = [
        measure(
            args.folder,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            packing=packing,
            workers=workers,
            seconds=args.seconds,
            cold=cold,
        )
        for cold in (False, True)
        for packing in ("concat", "best_fit")
        for workers in args.workers
    ]
    options = f"--seq-len {args.seq_len} --batch-size {args.batch_size} --seconds {args.seconds}"
    origin = environment() | {"command": f"python -m samu_lm.benchmarks.loader shards {options}"}
    record = {"results": results, "load_average": os.getloadavg(), "environment": origin}
    text = json.dumps(record, indent=1, sort_keys=True)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
