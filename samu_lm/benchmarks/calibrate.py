"""``samu-lm calibrate``: measures candidate plans per shape and writes the record that dispatch reads.

Candidates of a shape run in alternating order, forward and reverse, each only after it agrees with float64. Of those
whose median of forward + backward is within 3% of the least, the one with the least product of time and memory is what
problems of this shape run with from then on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from samu_lm.benchmarks import report, timing
from samu_lm.benchmarks.arguments import check_output, check_positive
from samu_lm.benchmarks.beside import default_jobs, run_beside
from samu_lm.benchmarks.cases import PHASES, CheckFailed, Shape, hold, samu_case
from samu_lm.benchmarks.shapes import CALIBRATED, parse_shapes, require_gpu
from samu_lm.benchmarks.statistics import counterbalanced, merge_rounds
from samu_lm.errors import ConfigError
from samu_lm.ops.common import dispatch
from samu_lm.ops.samu.kernel_plan import OP, Plan, use_plan

_FUSED = {"fused": True, "rebuild": True}
_PREFETCH = {"control_prefetch": True, "gradient_prefetch": True}
_ONE_PASS = {"fused_controls": True, "piece": 16} | _FUSED
_TILES = {"tiles": True, "control_registers": 128} | _PREFETCH | _ONE_PASS
# What is tried, name to the fields of Plan that it sets: chunks, one pass or two for the controls and chunk states, row
# by row or by tiles, one or two levels of the prefix, rows asked for ahead, and a quarter of the kept states left out.
CANDIDATES: dict[str, dict[str, Any]] = {
    "chunk32": {"chunk": 32, "group": 128} | _FUSED,
    "chunk32_prefetch": {"chunk": 32, "group": 128, "gradient_prefetch": True} | _FUSED,
    "chunk64_one_pass": {"chunk": 64} | _ONE_PASS,
    "chunk64_one_level": {"chunk": 64, "group": 4096} | _FUSED,
    "chunk64_gradient_prefetch": {"chunk": 64, "gradient_prefetch": True} | _ONE_PASS,
    "chunk64_prefetch": {"chunk": 64} | _PREFETCH | _ONE_PASS,
    "chunk64_sparse": {"chunk": 64, "save_skip": 4, "gradient_prefetch": True} | _ONE_PASS,
    "chunk128_gradient_prefetch": {"chunk": 128, "gradient_prefetch": True} | _ONE_PASS,
    "chunk128_sparse": {"chunk": 128, "save_skip": 4, "gradient_prefetch": True} | _ONE_PASS,
    "chunk128_tiles": {"chunk": 128} | _TILES,
    "chunk128_tiles_sparse": {"chunk": 128, "save_skip": 4} | _TILES,
}
# A plan that takes this much longer than the fastest may run, if it saves a greater part of the memory.
TOLERANCE = 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm calibrate``."""
    parser.epilog = (
        "example: samu-lm calibrate --shapes 1,32768,1024 4,2048,2048. Needs a GPU. Of the plans within 3% of the "
        "fastest the one with the least product of time and memory is what dispatch then takes."
    )
    parser.add_argument("--shapes", nargs="+", metavar="B,L,W", help="default: the nine shapes of the record in force")
    parser.add_argument(
        "--candidates", type=Path, help='JSON, {"name": {"chunk": 32, "fused": true}, ...}; default: built in'
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds; every second one runs in reverse order")
    parser.add_argument("--repeats", type=int, default=5, help="samples per round and phase")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), help="processes that compile before the clock starts"
    )
    parser.add_argument("--output", type=Path, help="default: overwrites the record that dispatch reads")


def read_candidates(path: Path | None) -> dict[str, Plan]:
    """Plans by name.

    Raises:
        ConfigError: the file is missing or no JSON, or a field does not exist.
    """
    named = CANDIDATES
    if path is not None:
        if not path.is_file():
            raise ConfigError("--candidates", path, "no such file; give a JSON file of names to fields of the plan")
        try:
            named = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError("--candidates", path, f"is not JSON ({error})") from error
    try:
        plans = {name: Plan(**fields) for name, fields in named.items()}
    except (TypeError, AttributeError) as error:
        remedy = f"must be names to fields of the plan ({error}); fields are {', '.join(asdict(Plan()))}"
        raise ConfigError("--candidates", path, remedy) from error
    if not plans:
        raise ConfigError("--candidates", path, "names no candidate")
    return plans


# What a plan that is wrong, or too much for the device, raises.
_FAILURES = (CheckFailed, TritonError, RuntimeError, ValueError)
# Rows and tokens that a plan is checked at, at the shape's width.
CHECKED = (2, 1536)
# Plans that agreed with float64, by width: the check's other sizes are always the same.
_agreed: set[tuple[Plan, int]] = set()


def measure(shape: Shape, plans: dict[str, Plan], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one shape, one per candidate that agrees with float64 and fits the device."""
    case, good = samu_case(shape, True), []
    for name, plan in plans.items():
        with use_plan(plan):
            try:
                if (plan, shape[2]) not in _agreed:
                    hold("samu", (*CHECKED, shape[2]), torch.bfloat16)
                    _agreed.add((plan, shape[2]))
                case.forward_backward()
            except _FAILURES as error:
                print(f"{shape} {name}: left out: {str(error)[:200]}", file=sys.stderr)
                continue
        good.append(name)
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in good}
    for number, place, name in counterbalanced(rounds, good):
        with use_plan(plans[name]):
            samples = case.samples(timing.queued_samples, repeats)
        taken[name].append({"round": number, "order_index": place, **samples})
    rows = []
    for name in good:
        with use_plan(plans[name]):
            memory = timing.peak_memory(case.forward_backward)
        batch, length, width = shape
        rows.append(
            {
                "shape": {"batch": batch, "length": length, "width": width},
                "candidate": name,
                **merge_rounds(taken[name], PHASES),
                "peak_allocated_delta_bytes": memory["peak_allocated_delta_bytes"],
                "peak_reserved_delta_bytes": memory["peak_reserved_delta_bytes"],
            }
        )
    return rows


def compile_plan(item: tuple[Shape, Plan]) -> None:
    """Compiles a plan for a shape and for its check; a plan that fails is left to :func:`measure` to report."""
    shape, plan = item
    with use_plan(plan), contextlib.suppress(*_FAILURES):
        hold("samu", (*CHECKED, shape[2]), torch.bfloat16)
        samu_case(shape, True).forward_backward()


def _time(row: dict[str, Any]) -> float:
    return float(row["forward_backward"]["median_ms"])


def entry(shape: Shape, rows: list[dict[str, Any]], fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What dispatch needs of a shape's rows."""
    ranked = sorted(rows, key=_time)
    good = [row for row in ranked if _time(row) <= (1 + TOLERANCE) * _time(ranked[0])]
    best = min(good, key=lambda row: _time(row) * row["peak_allocated_delta_bytes"])
    second = next((row for row in ranked if row is not best), best)
    batch, length, width = shape
    return {
        "batch": batch,
        "length": length,
        "width": width,
        "choice": best["candidate"],
        "fields": fields[best["candidate"]],
        "milliseconds": _time(best),
        "runner_up": second["candidate"],
        "margin": _time(second) / _time(best) - 1,
    }


def run(args: argparse.Namespace) -> int:
    """Measures and writes the record; prints each shape's choice."""
    shapes, plans = parse_shapes(args.shapes, CALIBRATED), read_candidates(args.candidates)
    check_positive(rounds=args.rounds, repeats=args.repeats)
    require_gpu()
    output = args.output or dispatch.record_path(OP)
    check_output(output)
    run_beside(compile_plan, [(shape, plan) for shape in shapes for plan in plans.values()], args.jobs)
    default = Plan()
    fields = {n: {k: v for k, v in asdict(p).items() if v != getattr(default, k)} for n, p in plans.items()}
    record: dict[str, Any] = {
        "format": dispatch.FORMAT,
        "schema_version": 1,
        "protocol": {
            "scope": "complete SAMU mixer: two shared controls, normalized writes and recurrence",
            "input_gradient": True,
            "dtype": "bfloat16 activations, float32 recurrent carry",
            "candidate_class": "calibration; final data are separate",
            "order": "alternating forward/reverse",
            "compile_excluded": True,
            "times": "device events around one warm call, the host ahead of the device",
            "resets": "internal: documents of 1,024 tokens on average",
        },
        "environment": timing.environment(),
        "command": report.command(),
        "candidates": fields,
        "entries": [],
        "rows": [],
    }
    for shape in shapes:
        rows = measure(shape, plans, args.rounds, args.repeats)
        if not rows:
            raise ConfigError("--candidates", args.candidates, f"no candidate runs and agrees with float64 at {shape}")
        record["rows"] += rows
        record["entries"].append(entry(shape, rows, fields))
        chosen = record["entries"][-1]
        print(
            f"{shape}: {chosen['choice']} {chosen['milliseconds']:.3f} ms, "
            f"then {chosen['runner_up']} ({chosen['margin']:+.1%})"
        )
        report.write_json(output, record)
        torch.cuda.empty_cache()
    return 0
