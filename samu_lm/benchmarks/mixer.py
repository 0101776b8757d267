"""``samu-lm bench mixer``: the mixers' times and memory, forward, backward and both, beside the copy ceiling.

The JSON keeps the fields of the recorded tables that it is compared with (schema 1): rows per shape and architecture,
samples of each phase, counterbalanced rounds, peak memory. A row is timed only after its kernels agree with float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from samu_lm.benchmarks import timing
from samu_lm.benchmarks.arguments import check_output, check_positive
from samu_lm.benchmarks.beside import default_jobs, run_beside
from samu_lm.benchmarks.cases import CASES, MIXERS, PHASES, Case, Shape, check
from samu_lm.benchmarks.report import command, mixer_table, plot_mixer, write_json, write_table
from samu_lm.benchmarks.shapes import parse_shapes, require_gpu
from samu_lm.benchmarks.statistics import counterbalanced, merge_rounds
from samu_lm.errors import ConfigError

# Bytes per element of [B, L, W] that no implementation can avoid, bfloat16, forward and with the backward pass. Mixers
# read x and write y; then they read x, y and the incoming gradient and write the gradient of x. The convolution's
# backward pass needs no y.
BYTES = {"samu": (4, 12), "rglru": (4, 12), "causal_conv1d": (4, 10)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench mixer``."""
    parser.epilog = "example: samu-lm bench mixer --shapes 1,131072,1024 --output mixer.json"
    parser.add_argument("--shapes", nargs="+", metavar="B,L,W", help="default: the shapes of the recorded tables")
    parser.add_argument("--architectures", nargs="+", choices=sorted(CASES), default=list(MIXERS))
    parser.add_argument("--rounds", type=int, default=2, help="rounds; every second one runs in reverse order")
    parser.add_argument("--repeats", type=int, default=5, help="samples per round and phase")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), help="processes that compile before the clock starts"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("mixer.json"), help="JSON; table (.md) and plot (.png) beside"
    )
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="measure nothing: table and plot of a recorded file"
    )


def _row(case: Case, rounds: list[dict[str, Any]], ceiling: float) -> dict[str, Any]:
    batch, length, width = case.shape
    queued = timing.queued_median(case.forward_backward)
    row: dict[str, Any] = {
        "shape": {"batch": batch, "length": length, "width": width},
        "architecture": case.architecture,
        "backend": "triton",
        "controller": "fused" if case.architecture == "samu" else None,
        "resets": "internal" if case.resets else "none",
        **merge_rounds(rounds, PHASES),
        **timing.peak_memory(case.forward_backward),
        "parameters": case.parameters,
        "parameter_bytes": 4 * case.parameters,
        "dynamic_control_values_per_token": {"samu": 2, "rglru": 2 * width}.get(case.architecture, 0),
        "materialized_state_sized_transition": False,
        "launches": case.launches(),
        "host_ms": timing.host_time(case.forward_backward),
        "kernels_ms": timing.kernel_times(case.forward_backward),
        "forward_queued_ms": timing.queued_median(case.forward),
        "forward_backward_queued_ms": queued,
        "forward_backward_graph_ms": timing.graph_median(case.forward_backward),
    }
    elements = batch * length * width
    floors = [elements * count / (ceiling * 1e9) for count in BYTES[case.architecture]]
    row["floor_forward_ms"], row["floor_forward_backward_ms"] = floors
    row["forward_fraction_of_copy"] = row["floor_forward_ms"] / row["forward_queued_ms"]
    row["forward_backward_fraction_of_copy"] = floors[1] / queued
    return row


def measure_shape(
    shape: Shape, architectures: list[str], rounds: int, repeats: int, ceiling: float
) -> list[dict[str, Any]]:
    """Rows of one shape: each architecture with and without internal resets, in counterbalanced order."""
    errors = {name: check(name, shape) for name in architectures}
    cases = [CASES[name](shape, resets) for name in architectures for resets in (True, False)]
    taken: list[list[dict[str, Any]]] = [[] for _ in cases]
    for number, place, index in counterbalanced(rounds, range(len(cases))):
        of_phases = cases[index].samples(timing.event_samples, repeats)
        taken[index].append({"round": number, "order_index": place, **of_phases})
    rows = []
    for case, samples in zip(cases, taken, strict=True):
        row = _row(case, samples, ceiling)
        row["errors"] = errors[case.architecture]
        rows.append(row)
    return rows


def compile_case(item: tuple[str, Shape]) -> None:
    """Compiles everything that a shape's check and its cases run."""
    architecture, shape = item
    check(architecture, shape, whole=False)
    for resets in (True, False):
        CASES[architecture](shape, resets).forward_backward()


def report(result: dict[str, Any], path: Path) -> None:
    """Writes table and plot beside ``path``, a JSON file's, and prints the table."""
    write_table(path, mixer_table(result))
    try:
        plot_mixer(result, path.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no plot: {error}; draw it elsewhere with `samu-lm bench mixer --report {path}`", file=sys.stderr)


def read_result(path: Path) -> dict[str, Any]:
    """A recorded result.

    Raises:
        ConfigError: there is no such file, or it is not a result of this command.
    """
    if not path.is_file():
        raise ConfigError("--report", path, "no such file; give the JSON that `samu-lm bench mixer` wrote")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("--report", path, f"is not JSON ({error})") from error
    if not isinstance(result, dict) or not result.get("rows") or "copy_tb_s" not in result:
        raise ConfigError("--report", path, "holds no mixer rows; give the JSON that `samu-lm bench mixer` wrote")
    return result


def run(args: argparse.Namespace) -> int:
    """Measures, writes JSON, Markdown and PNG, prints the Markdown table."""
    if args.report is not None:
        try:
            report(read_result(args.report), args.report)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError("--report", args.report, f"is no whole result ({error!r}); record it again") from error
        except OSError as error:
            raise ConfigError(
                "--report", args.report, f"no file can be written beside it ({error.strerror})"
            ) from error
        return 0
    shapes = parse_shapes(args.shapes)
    check_positive(rounds=args.rounds, repeats=args.repeats)
    require_gpu()
    check_output(args.output)
    run_beside(compile_case, [(name, shape) for shape in shapes for name in args.architectures], args.jobs)
    ceiling = timing.copy_rate()
    result: dict[str, Any] = {
        "schema_version": 1,
        "protocol": {
            "scope": "complete mixer: controls or gates, recurrence, input and parameter gradients",
            "dtype": "bfloat16 activations, float32 parameters and carry",
            "input_gradient": True,
            "order": "forward/reverse counterbalanced",
            "compile_excluded": True,
            "times": "device events around one warm call; queued: with the host ahead; graph: CUDA graph replay",
            "resets": "internal: documents of 1,024 tokens on average; none: one document per row",
        },
        "environment": timing.environment(),
        "command": command(),
        "copy_tb_s": ceiling,
        "rows": [],
    }
    for shape in shapes:
        result["rows"] += measure_shape(shape, args.architectures, args.rounds, args.repeats, ceiling)
        torch.cuda.empty_cache()
        write_json(args.output, result)
    report(result, args.output)
    return 0
