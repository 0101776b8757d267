"""Several corpora in one sequence of rows, in exact proportions.

Weights are whole numbers w_1 ... w_K without a common divisor, W their sum. The sequence is made of rounds of W rows,
and every round has exactly w_k rows of source k, in an order of its own. An epoch is the fewest rounds in which every
source is read through at least once: max_k ceil(R_k / w_k), where R_k is the number of rows of source k. So an epoch
has exactly w_k / W of its rows from source k, and so has any number of whole rounds.

Each source is read through again and again, in a new order each time, and goes on in the next epoch where it stopped in
the last: row i of source k over the whole run is row i mod R_k of its pass i // R_k, and no document of a source comes
again before all others of it have come. All of it is integer arithmetic on (seed, epoch, position).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samu_lm.data.batch import Batch
from samu_lm.data.packing import Packing, Plan, Segments, fill_rows, order_keys
from samu_lm.data.sources import Source
from samu_lm.errors import ConfigError

_ROUNDS = 2**32 - 1  # the stream of `order_keys` that orders rounds; streams from 0 on are the sources' own
MAX_ROUND = 100_000


def whole_weights(weights: Mapping[str, Any]) -> list[int]:
    """Weights as whole numbers without a common divisor; 0.7 means 7/10.

    Raises:
        ConfigError: a weight that is no positive number, or weights whose round would be longer than `MAX_ROUND` rows.
    """
    fractions = []
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise ConfigError(f"data.weights.{name}", weight, "give a positive number")
        fractions.append(Fraction(repr(weight)))
    scale = math.lcm(*(f.denominator for f in fractions))
    whole = [int(f * scale) for f in fractions]
    whole = [w // math.gcd(*whole) for w in whole]
    if sum(whole) > MAX_ROUND:
        ratio = ":".join(map(str, whole))
        remedy = f"are {ratio} in whole numbers, whose sum must be at most {MAX_ROUND}; give rounder ones"
        raise ConfigError("data.weights", dict(weights), remedy)
    return whole


class MixtureSource(Source):
    """Several named sources.

    Args:
        sources: the sources by name.
        weights: each one's share of the rows, in proportion to the others'; see the module's docstring.
    """

    def __init__(self, sources: Mapping[str, Source] | None, weights: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.sources = dict(sources or {})
        self.given_weights = dict(weights or {})

    def check(self) -> None:
        if not self.sources:
            remedy = "name at least one, e.g. 'data.sources={code:{_target_:samu_lm.data.TextSource,path:src}}'"
            raise ConfigError("data.sources", None, remedy)
        for name in self.given_weights:
            if name not in self.sources:
                remedy = f"there is no such source; data.sources has {', '.join(self.sources)}"
                raise ConfigError(f"data.weights.{name}", self.given_weights[name], remedy)
        self.weights()
        for name, source in self.sources.items():
            if not isinstance(source, Source) or isinstance(source, MixtureSource):
                remedy = "give a source such as {_target_: samu_lm.data.JsonlSource, path: FILE}"
                raise ConfigError(f"data.sources.{name}", source, remedy)
            with _named(name):
                source.check()

    def weights(self) -> list[int]:
        for name in self.sources:
            if name not in self.given_weights:
                raise ConfigError(f"data.weights.{name}", None, "has no value; give each source its weight")
        return whole_weights({name: self.given_weights[name] for name in self.sources})

    def parts(self) -> dict[str, Source]:
        return self.sources

    def name(self) -> tuple[str, object]:
        return "data.sources", ", ".join(self.sources)

    def documents(self) -> Iterator[bytes]:
        """The documents of all sources, one of each in turn while they last."""
        streams = [source.documents() for source in self.sources.values()]
        while streams:
            for stream in list(streams):
                text = next(stream, None)
                if text is None:
                    streams.remove(stream)
                else:
                    yield text
        self.num_empty = sum(source.num_empty for source in self.sources.values())
        self.num_skipped = sum(source.num_skipped for source in self.sources.values())

    def _read(self, unit: Any, skip: int) -> Iterator[bytes | None]:
        raise NotImplementedError("a mixture is read source by source")


class _named:
    """Puts the source's name into the key of an error: data.path becomes data.sources.NAME.path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ConfigError) and error.key.startswith("data"):
            key = f"data.sources.{self.name}{error.key.removeprefix('data')}"
            raise ConfigError(key, error.value, error.remedy) from error


def _take_each(
    groups: Iterator[tuple[Plan, Any, NDArray[np.int64], NDArray[np.int64]]], count: int, seq_len: int, pad_id: int
) -> Batch:
    """A batch of rows from several plans: of each (plan, tokens, places in the batch, rows of the plan)."""
    nothing = Segments._make(np.zeros(0, dtype=t) for t in (np.int64, np.int64, np.int64, np.bool_, np.bool_))
    out = fill_rows(np.zeros(0, dtype=np.uint16), nothing, count, seq_len, pad_id)
    for plan, tokens, places, rows in groups:
        batch = plan.take(tokens, rows, pad_id)
        for name in ("tokens", "targets", "reset", "loss_mask"):
            getattr(out, name)[places] = getattr(batch, name)
    return out


class ChainedPlan(Plan):
    """Plans one after another; tokens are a sequence with one entry a plan."""

    def __init__(self, plans: Sequence[Plan], seq_len: int) -> None:
        self.plans, self.seq_len = plans, seq_len
        self.ends = np.cumsum([plan.num_rows for plan in plans])

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1])

    def packing(self) -> Packing:
        each = [plan.packing() for plan in self.plans]
        return Packing(*(sum(values) for values in zip(*each, strict=True)))

    def take(self, tokens: Any, rows: NDArray[np.int64], pad_id: int) -> Batch:
        which = np.searchsorted(self.ends, rows, side="right")

        def groups() -> Iterator[tuple[Plan, Any, NDArray[np.int64], NDArray[np.int64]]]:
            for k, plan in enumerate(self.plans):
                places = np.flatnonzero(which == k)
                if len(places):
                    yield plan, tokens[k], places, rows[places] - (self.ends[k] - plan.num_rows)

        return _take_each(groups(), len(rows), self.seq_len, pad_id)


class MixturePlan(Plan):
    """An epoch's rows of a mixture; see the module's docstring for which they are.

    Args:
        weights: whole numbers, one a source.
        part_rows: rows of a pass through each source.
        plan_of: (source, pass) to the plan of that pass. The latest of each source is kept.
        seed: decides the order within rounds.
        epoch: the epoch.
        seq_len: tokens a row.
    """

    def __init__(
        self,
        weights: Sequence[int],
        part_rows: Sequence[int],
        plan_of: Callable[[int, int], Plan],
        seed: int,
        epoch: int,
        seq_len: int,
    ) -> None:
        self.weights, self.part_rows = np.array(weights, dtype=np.int64), np.array(part_rows, dtype=np.int64)
        self.seed, self.epoch, self.seq_len = seed, epoch, seq_len
        self._plan_of = plan_of
        self._latest: dict[int, tuple[int, Plan]] = {}

    @property
    def num_rounds(self) -> int:
        """Rounds of an epoch."""
        return int((-(-self.part_rows // self.weights)).max())

    @property
    def num_rows(self) -> int:
        return self.num_rounds * int(self.weights.sum())

    def packing(self) -> Packing:
        """Of as many passes through each source as the epoch has, whole or in part."""
        total = np.zeros(4)
        for k, weight in enumerate(self.weights.tolist()):
            rows = self.num_rounds * weight
            total += np.array(self._plan(k, self.epoch * rows // int(self.part_rows[k])).packing()) * (
                rows / self.part_rows[k]
            )
        return Packing(*(round(value) for value in total))

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of rows of this epoch: the source of each, and which of that source's rows over the whole run it is."""
        size = int(self.weights.sum())
        rounds, index = np.unique(rows // size, return_inverse=True)
        items = rounds[:, None] * size + np.arange(size)
        keys = order_keys(items.astype(np.uint64), self.seed, self.epoch, _ROUNDS)
        part = np.arange(len(self.weights)).repeat(self.weights)[np.argsort(keys, axis=1, kind="stable")]
        # The n-th row of a source within a round, counted in the round's order.
        first = np.cumsum(self.weights) - self.weights
        by_part = np.argsort(part, axis=1, kind="stable")
        nth = np.empty_like(part)
        np.put_along_axis(nth, by_part, np.arange(size) - first.repeat(self.weights), axis=1)
        part, nth = part[index, rows % size], nth[index, rows % size]
        return part, (self.epoch * self.num_rounds + rows // size) * self.weights[part] + nth

    def prepare(self, first_row: int) -> None:
        """Builds the plans that the rows from ``first_row`` on begin with; processes forked later share them."""
        last = min(first_row, self.num_rows - 1)
        for k, weight in enumerate(self.weights.tolist()):
            done = (self.epoch * self.num_rounds + last // int(self.weights.sum())) * weight
            self._plan(k, done // int(self.part_rows[k]))

    def _plan(self, part: int, number: int) -> Plan:
        if part not in self._latest or self._latest[part][0] != number:
            self._latest[part] = (number, self._plan_of(part, number))
        return self._latest[part][1]

    def take(self, tokens: Any, rows: NDArray[np.int64], pad_id: int) -> Batch:
        inside = np.flatnonzero(rows < self.num_rows)
        part, row = self.places(rows[inside])
        number, row = row // self.part_rows[part], row % self.part_rows[part]

        def groups() -> Iterator[tuple[Plan, Any, NDArray[np.int64], NDArray[np.int64]]]:
            for k, n in sorted(set(zip(part.tolist(), number.tolist(), strict=True))):
                mine = (part == k) & (number == n)
                yield self._plan(k, n), tokens[k], inside[mine], row[mine]

        return _take_each(groups(), len(rows), self.seq_len, pad_id)
