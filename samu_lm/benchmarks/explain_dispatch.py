"""``samu-lm explain-dispatch B L W``: what a SAMU mixer of this shape runs with, and why."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from samu_lm.benchmarks.shapes import parse_shapes
from samu_lm.ops.common import dispatch
from samu_lm.ops.samu.kernel_plan import OP, plan_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm explain-dispatch``."""
    parser.epilog = "example: samu-lm explain-dispatch 1 32768 1024"
    for name, text in (("batch", "rows"), ("length", "tokens per row"), ("width", "width of the recurrence")):
        parser.add_argument(name, help=text)


def explain(batch: int, length: int, width: int) -> list[str]:
    """The lines that the command prints."""
    path = dispatch.record_path(OP)
    environment, entries = dispatch.read_record(path)
    found = dispatch.choose(entries, batch, length, width)
    plan = plan_for(batch, length, width)
    lines = [f"SAMU mixer at (B, L, W) = ({batch}, {length}, {width})"]
    if found is None:
        lines.append(f"no calibration record ({path.name}): the built-in rule decides")
    else:
        same = (found.batch, found.length, found.width) == (batch, length, width)
        where = "measured" if same else f"nearest measured: ({found.batch}, {found.length}, {found.width})"
        gpu, torch_version, triton_version = (environment[k] for k in ("gpu", "torch", "triton"))
        lines += [
            f"{where}, on {gpu}, torch {torch_version}, triton {triton_version}",
            f"runs      {found.choice}: {found.milliseconds:.3f} ms forward + backward there",
            f"runner-up {found.runner_up}: +{found.margin:.1%}",
        ]
    lines.append("plan      " + ", ".join(f"{k}={v}" for k, v in asdict(plan).items()))
    return lines


def run(args: argparse.Namespace) -> int:
    """Prints the explanation."""
    ((batch, length, width),) = parse_shapes([f"{args.batch},{args.length},{args.width}"])
    print("\n".join(explain(batch, length, width)))
    return 0
