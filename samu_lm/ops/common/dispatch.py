"""Which plan a kernel runs with, by shape, from a calibration record that lies beside this file.

A record (``dispatch_<op>.json``) is written by ``samu-lm calibrate``: per measured shape the candidates' times, with
GPU and versions. A shape that was not measured takes the choice of the nearest measured one: nearest width first, then
nearest number of tokens, each on a logarithmic scale. Only comparisons of sizes are used, so that sizes may be symbolic
while torch.compile traces; it then guards on a handful of ranges, not on every length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """A measured shape and how its candidates came out.

    Attributes:
        batch, length, width: the shape.
        choice: name of the candidate with the least time x memory of those within 3% of the fastest.
        fields: what the candidate sets, by field name.
        milliseconds: its forward + backward median.
        runner_up, margin: name of the fastest other one, and how much longer it took (0.03 is 3%; below 0: it is
            faster and takes more memory).
    """

    batch: int
    length: int
    width: int
    choice: str
    fields: dict[str, Any]
    milliseconds: float
    runner_up: str
    margin: float

    @property
    def tokens(self) -> int:
        return self.batch * self.length


def record_path(op: str) -> Path:
    """Where the record of an op lies."""
    return Path(__file__).with_name(f"dispatch_{op}.json")


@lru_cache(maxsize=16)
def read_record(path: Path) -> tuple[dict[str, str], tuple[Entry, ...]]:
    """Environment and entries of a record; nothing of either without one.

    Raises:
        ValueError: the file is of another format.
    """
    if not path.is_file():
        return {}, ()
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(f"{path.name}: format={record.get('format')}: must be {FORMAT}; run `samu-lm calibrate` again")
    return record["environment"], tuple(Entry(**entry) for entry in record["entries"])


def _nearest(values: list[int], wanted: int) -> int:
    """The value nearest to ``wanted`` by ratio; ``values`` ascend."""
    for low, high in pairwise(values):
        if wanted * wanted < low * high:
            return low
    return values[-1]


def choose(entries: tuple[Entry, ...], batch: int, length: int, width: int) -> Entry | None:
    """The entry whose choice a shape takes, or None without entries."""
    if not entries:
        return None
    nearest_width = _nearest(sorted({e.width for e in entries}), width)
    of_width = [e for e in entries if e.width == nearest_width]
    tokens = _nearest(sorted({e.tokens for e in of_width}), batch * length)
    of_tokens = [e for e in of_width if e.tokens == tokens]
    nearest_length = _nearest(sorted({e.length for e in of_tokens}), length)
    return next(e for e in of_tokens if e.length == nearest_length)
