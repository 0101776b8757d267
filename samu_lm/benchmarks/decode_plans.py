"""Sizes of the decoder's kernels, tried on a whole token: what ``bench decode --candidates`` and ``--search`` do.

A kernel that starts while the last one runs has no time of its own, so a candidate is timed by the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samu_lm.benchmarks import timing
from samu_lm.benchmarks.float64 import relative_error
from samu_lm.errors import ConfigError
from samu_lm.model import Decoder, RecurrentLM
from samu_lm.ops.decode import Plan

# [rows, warps, inputs at a time, groups]: with 256 at a time a warp owns whole rows, with more several warps share one.
MATRIX = [
    *([2, 2, 256], [4, 4, 256], [8, 8, 256], [16, 16, 256], [4, 2, 256, 2], [8, 4, 256, 2], [16, 8, 256, 2]),
    *([16, 4, 256, 4], [32, 8, 256, 4], [1, 2, 512], [2, 4, 512], [4, 8, 512], [2, 2, 512, 2], [4, 4, 512, 2]),
    *([8, 8, 512, 2], [8, 4, 512, 4], [1, 4, 1024], [2, 4, 1024, 2], [4, 4, 1024, 4]),
]
SEARCHED: dict[str, list[list[int]]] = {
    "mlp_input": MATRIX,
    "mlp_output": MATRIX,
    "input": MATRIX,
    "output": MATRIX,
    "logits": MATRIX,
    "samu": [[16, 8], [32, 4], [32, 8], [32, 16], [64, 4], [64, 8], [64, 16], [128, 8], [256, 8]],
    "rglru": [[8, 4], [8, 8], [16, 2], [16, 4], [16, 8], [32, 4], [32, 8], [64, 8]],
}
_TOKENS = 4
_REPEATS = 100


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Candidates by name: changes to the mixer's default plan, as :meth:`Plan.changed` takes them.

    Raises:
        ConfigError: ``--candidates`` cannot be read, or one of them is no plan.
    """
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("--candidates", path, f"cannot be read ({error}); give a JSON file") from error
    if not isinstance(given, dict) or not all(isinstance(changes, dict) for changes in given.values()):
        raise ConfigError("--candidates", path, 'must be {"name": {"output": [4, 4, 256], ...}, ...}')
    for name, changes in given.items():
        try:
            Plan().changed(changes)
        except ValueError as error:
            raise ConfigError("--candidates", path, f"{name}: {error}") from error
    return given


def best(
    model: RecurrentLM,
    plan: Plan,
    candidates: dict[str, dict[str, Any]],
    search: bool,
    start: Callable[[Decoder], Callable[[], Any]],
) -> tuple[Plan, list[dict[str, Any]]]:
    """The fastest plan for one row, and every one that was tried.

    Args:
        model: the model, on its device.
        plan: to start from.
        candidates: whole plans that are tried first, as changes to it.
        search: then try the sizes of :data:`SEARCHED`, a kernel at a time, each with the best of those before it.
        start: a decoder to the call that advances it.

    Returns:
        The plan, and a row for each: its name, sizes, median milliseconds a token, or why it failed. The first is the
        plan to start from without overlap: a candidate whose logits are not that one's has failed.

    Raises:
        Exception: the first plan does not run.
    """
    trial, given = _Trial(model, start), plan
    alone = replace(plan, overlap=False)
    time, together = trial.run("no overlap", alone), trial.run("default", plan)
    plan, time = (plan, together) if together < time else (alone, time)
    for name, changes in candidates.items():
        other = given.changed(changes)
        if (taken := trial.run(name, other)) < time:
            plan, time = other, taken
    for kernel, size in _searched(model.mixer) if search else ():
        other = plan.changed({kernel: size})
        if other != plan and (taken := trial.run(f"{kernel} {size}", other)) < time:
            plan, time = other, taken
    return plan, trial.rows


def _searched(mixer: str) -> Iterator[tuple[str, list[int]]]:
    others = {"samu", "rglru"} - {mixer}
    for kernel, sizes in SEARCHED.items():
        if kernel not in others:
            yield from ((kernel, size) for size in sizes)


class _Trial:
    """Times plans on one model and holds them to the first one's logits."""

    def __init__(self, model: RecurrentLM, start: Callable[[Decoder], Callable[[], Any]]) -> None:
        self.model, self.start = model, start
        self.rows: list[dict[str, Any]] = []
        self.truth: torch.Tensor | None = None

    def run(self, name: str, plan: Plan) -> float:
        """Milliseconds a token; infinite where the plan does not run."""
        row: dict[str, Any] = {"architecture": self.model.mixer, "name": name, "plan": plan.as_dict()}
        self.rows.append(row)
        try:
            decoder = Decoder(self.model, 1, plan)
            advance = self.start(decoder)
            for _ in range(_TOKENS):
                decoder.tokens.fill_(1)
                advance()
            logits = decoder.last_logits.clone()
            if self.truth is None:
                self.truth = logits
            row["error"] = relative_error(logits, self.truth)
            if not row["error"] < 1e-2:
                raise RuntimeError(f"logits are {row['error']:.1e} from the first plan's")
            row["median_ms"] = timing.median(timing.event_samples(advance, _REPEATS))
        except Exception as error:  # a candidate that asks for too much must not end the search
            if self.truth is None:
                raise
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(f"{row['architecture']} {name}: {row.get('median_ms', row.get('failed'))}", flush=True)
        return float(row.get("median_ms", float("inf")))


def parts(model: RecurrentLM, plan: Plan) -> dict[str, float]:
    """Milliseconds that the kernels of a token take one after another, without overlap, by what they do."""
    decoder = Decoder(model, 1, replace(plan, overlap=False))
    block = ["input", model.mixer, "output", "mlp_input", "mlp_output"]
    names = ["embed", *block * model.depth, "logits", "choose"]
    totals: dict[str, float] = {}
    times = timing.kernel_times(decoder.advance)
    if len(times) != len(names):  # the profiler missed some: only its own names are sure
        names = [name for name, _ in times]
    for name, (_, time) in zip(names, times, strict=True):
        totals[name] = totals.get(name, 0.0) + time
    return totals
