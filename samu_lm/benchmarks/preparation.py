"""How fast `samu-lm prepare` tokenizes a large corpus, and how much memory it takes.

    python -m samu_lm.benchmarks.preparation FOLDER --gigabytes 5 --output prepare_bytes.json -- tokenizer=bytes

Writes a corpus of JSON lines into FOLDER (kept for the next measurement; delete it afterwards): documents of a few
lines to some thousand, cut from the standard library's sources at random places, so that all are different. What
stands behind ``--`` goes to the command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samu_lm.data import StdlibSource
from samu_lm.environment import environment

_SAMPLE_SECONDS = 0.05


def documents(size: int, seed: int = 0) -> Iterator[str]:
    """Different documents of ``size`` bytes of text in all."""
    lines = [
        line
        for text in StdlibSource(include_tests=True).documents()
        for line in text.decode().splitlines(keepends=True)
    ]
    chance = random.Random(seed)
    number = done = 0
    while done < size:
        length = min(2000, max(3, int(chance.lognormvariate(3.5, 1.0))))
        start = chance.randrange(len(lines) - length)
        text = f"document {number}\n{''.join(lines[start : start + length])}"
        number, done = number + 1, done + len(text.encode())
        yield text


def write_corpus(folder: Path, size: int) -> Path:
    """JSON lines with ``size`` bytes of text; a file of an earlier call is taken as it is."""
    path = folder / f"corpus-{size}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        work = path.with_suffix(".partial")
        with open(work, "w", encoding="utf-8") as file:
            for text in documents(size):
                file.write(json.dumps({"text": text}) + "\n")
        work.rename(path)
    return path


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(entry))
            except OSError:  # it has just ended
                continue
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


def _sample(pids: list[int], cpu: dict[int, float]) -> int:
    """Bytes of resident memory, those of processes that share pages added up; notes each one's processor seconds."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[21]) * resource.getpagesize()
        cpu[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(corpus: Path, out: Path, overrides: Sequence[str], limit: float) -> dict[str, Any]:
    """Runs the command once into a new folder.

    Args:
        corpus: a file of JSON lines.
        out: the folder, deleted before and kept.
        overrides: further arguments.
        limit: seconds after which the command is killed; its speed is then that of what it had finished.

    Returns:
        Speed in MB (10**6 bytes) of text once the vocabulary is learnt, for a second of the clock and of the processor
        time of all processes together; memory, what was written, and the command.
    """
    shutil.rmtree(out, ignore_errors=True)
    command = ["samu-lm", "prepare", "data=jsonl", f"data.path={corpus}", f"out={out}", *overrides]
    began, peak, learnt, learnt_cpu = time.perf_counter(), 0, 0.0, 0.0
    cpu: dict[int, float] = {}
    process = subprocess.Popen([sys.executable, "-m", "samu_lm", *command[1:]])
    while process.poll() is None and time.perf_counter() - began < limit:
        peak = max(peak, _sample(_family(process.pid), cpu))
        if not learnt and (out / "parts" / "tokenizer.json").exists():
            learnt, learnt_cpu = time.perf_counter() - began, sum(cpu.values())
        time.sleep(_SAMPLE_SECONDS)
    stopped = process.poll() is None
    seconds = time.perf_counter() - began
    if stopped:
        process.kill()
    process.wait()
    if stopped:
        parts = [json.loads(file.read_text()) for file in sorted(out.glob("parts/*.json")) if file.stem.isdigit()]
        written = {key: sum(part[key] for part in parts) for key in ("documents", "tokens", "bytes")}
    else:
        manifest = json.loads((out / "manifest.json").read_text())
        written = {key: manifest[key] for key in ("documents", "tokens", "bytes")}
    return {
        "command": " ".join(["samu-lm prepare", *(a.replace(str(corpus.parent), "FOLDER") for a in command[2:])]),
        "exit_status": process.returncode,
        "stopped_after_seconds": limit if stopped else None,
        "seconds": seconds,
        "seconds_until_the_vocabulary_is_learnt": learnt,
        "written": written,
        "corpus_bytes": corpus.stat().st_size,
        "mb_per_second": written["bytes"] / 1e6 / (seconds - learnt),
        "processor_seconds": sum(cpu.values()),
        "mb_per_processor_second": written["bytes"] / 1e6 / (sum(cpu.values()) - learnt_cpu),
        "peak_resident_mib_of_all_processes": peak / 2**20,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures one call; prints and writes JSON."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m samu_lm.benchmarks.preparation", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=5.0, help="bytes of text, in 10**9")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--output", type=Path, help="file to write the JSON to")
    args = parser.parse_args(arguments[:split])
    corpus = write_corpus(args.folder, int(args.gigabytes * 1e9))
    load = os.getloadavg()
    result = measure(corpus, args.folder / "shards", arguments[split + 1 :], args.limit)
    machine = {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_gib": _memory(),
        "system": platform.platform(),
    }
    options = " ".join(arguments[split + 1 :])
    limit = "" if args.limit == float("inf") else f" --limit {args.limit:g}"
    command = f"python -m samu_lm.benchmarks.preparation FOLDER --gigabytes {args.gigabytes:g}{limit} -- {options}"
    origin = environment() | {"command": command}
    loads = {"before": load, "after": os.getloadavg()}
    record = {"result": result, "machine": machine, "load_average": loads, "environment": origin}
    text = json.dumps(record, indent=1, sort_keys=True)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


if __name__ == "__main__":
    main()
