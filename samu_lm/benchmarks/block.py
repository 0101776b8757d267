"""``samu-lm bench block``: one residual block's whole training step, forward, backward and fused AdamW.

Shapes: x ``[B, L, D]`` bfloat16, a leaf whose gradient is taken; parameters and carry float32, the block under bfloat16
autocast. Documents of 1,024 tokens on average. The JSON keeps the fields of the recorded table (schema 1).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samu_lm.benchmarks import report, timing
from samu_lm.benchmarks.arguments import add_fp8, check_output, check_positive
from samu_lm.benchmarks.beside import default_jobs, run_beside
from samu_lm.benchmarks.cases import DOCUMENT, MIXERS, CheckFailed
from samu_lm.benchmarks.float64 import relative_error
from samu_lm.benchmarks.report import MIB
from samu_lm.benchmarks.shapes import require_gpu
from samu_lm.benchmarks.statistics import counterbalanced, summary
from samu_lm.model import RecurrentBlock
from samu_lm.model.fp8 import check_fp8, convert_to_fp8

DEVICE = "cuda"
# Rows and tokens of the check.
CHECKED = (2, 600)
# Relative differences from the reference. The gradients of SAMU's amplitudes are sums whose terms nearly cancel: with
# operands in float8 they are only held to be finite.
BOUNDS = {"amplitude": 0.1, "other": 2e-2}
FP8_BOUNDS = {"y": 0.1, "x": 0.15, "amplitude": math.inf, "other": 0.4}


class Size(NamedTuple):
    """A case: rows, tokens per row, and the block's sizes."""

    batch: int
    length: int
    width: int
    rnn_width: int
    depth: int


SIZES = {
    "state2048_short": Size(4, 2048, 2048, 2048, 1),
    "state2560_medium": Size(1, 8192, 2560, 2560, 1),
    "400m_block_long": Size(1, 32768, 1536, 2048, 12),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench block``."""
    parser.epilog = "example: samu-lm bench block --cases 400m_block_long --output block.json"
    parser.add_argument("--cases", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--architectures", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--rounds", type=int, default=2, help="rounds; every second one runs in reverse order")
    parser.add_argument("--repeats", type=int, default=5, help="samples per round")
    add_fp8(parser)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), help="processes that compile before the clock starts"
    )
    parser.add_argument("--output", type=Path, default=Path("block.json"), help="JSON; table (.md) beside")


class Step:
    """A block with its optimizer, ready to take steps.

    Args:
        size: sizes of the case.
        mixer: ``samu`` or ``rglru``.
        compiled: run the block under torch.compile.
        backend: of the ops.
        fp8: recipe of the block's linear maps.
    """

    def __init__(self, size: Size, mixer: str, compiled: bool, backend: str = "auto", fp8: str = "none") -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.block = RecurrentBlock(size.width, size.rnn_width, mixer, size.depth, backend=backend)
            self.x = torch.randn(size.batch, size.length, size.width, dtype=torch.bfloat16).requires_grad_()
            self.reset = torch.rand(size.batch, size.length) < 1 / DOCUMENT
            self.grad = torch.randn_like(self.x)
        convert_to_fp8(self.block, fp8)
        self.optimizer = torch.optim.AdamW(self.block.parameters(), fused=True)
        self.run: Callable[..., Any] = torch.compile(self.block, dynamic=False) if compiled else self.block

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The output, and the gradients of x and of every parameter; left in ``grad`` as well."""
        self.optimizer.zero_grad(set_to_none=True)
        self.x.grad = None
        with torch.autocast(DEVICE, torch.bfloat16):
            y = self.run(self.x, self.reset)
        y.backward(self.grad)
        return y, [t.grad for t in (self.x, *self.block.parameters()) if t.grad is not None]

    def __call__(self) -> None:
        """Forward, backward, optimizer update."""
        self.gradients()
        self.optimizer.step()


def check(size: Size, mixer: str, compiled: bool, fp8: str = "none") -> dict[str, float]:
    """Holds the block on its kernels to the plain PyTorch definition, at the case's widths and a few hundred tokens.

    The definition is in bfloat16, also where the block is in float8.

    Returns:
        Relative differences of y and of every gradient.

    Raises:
        CheckFailed: one is off by more than a few roundings of bfloat16, which both make, in another order; or by more
            than those of float8 in several products.
    """
    small = size._replace(batch=CHECKED[0], length=CHECKED[1])
    results = []
    for backend in ("triton", "reference"):
        on_kernels = backend == "triton"
        step = Step(small, mixer, compiled and on_kernels, backend, fp8 if on_kernels else "none")
        y, grads = step.gradients()
        names = ["y", "x", *(name for name, _ in step.block.named_parameters())]
        results.append(dict(zip(names, [y.detach(), *grads], strict=True)))
    errors = {}
    for name, value in results[0].items():
        errors[name] = relative_error(value, results[1][name])
        bounds = BOUNDS if fp8 == "none" else FP8_BOUNDS
        bound = bounds.get("amplitude" if name.endswith("amplitude") else name, bounds["other"])
        if not errors[name] < bound:
            raise CheckFailed(f"{mixer} {tuple(small)}: {name} is off by {errors[name]:.1e} (bound {bound:.0e})")
    return errors


def compile_case(item: tuple[str, str, bool, str]) -> None:
    """Compiles everything that a case runs, its check included."""
    name, mixer, compiled, fp8 = item
    check(SIZES[name], mixer, compiled, fp8)
    Step(SIZES[name], mixer, compiled, fp8=fp8)()


def measure(
    name: str, mixers: list[str], rounds: int, repeats: int, compiled: bool, fp8: str = "none"
) -> dict[str, Any]:
    """A case's rows, one per mixer, in counterbalanced order."""
    size = SIZES[name]
    torch._dynamo.reset()  # the sizes of earlier cases are of no use, and count against the limit of recompilations
    errors = {mixer: check(size, mixer, compiled, fp8) for mixer in mixers}
    steps = {mixer: Step(size, mixer, compiled, fp8=fp8) for mixer in mixers}
    for step in steps.values():
        step()
    samples: dict[str, list[float]] = {mixer: [] for mixer in mixers}
    for _, _, mixer in counterbalanced(rounds, mixers):
        samples[mixer] += timing.event_samples(steps[mixer], repeats)
    rows = []
    for mixer in mixers:
        times = summary(samples[mixer])
        times["mad_ms"] = statistics.median(abs(s - times["median_ms"]) for s in samples[mixer])
        rows.append(
            {
                "architecture": mixer,
                "backend": "triton, torch.compile" if compiled else "triton",
                "controller": "fused" if mixer == "samu" else None,
                "resets": "internal",
                "optimizer_step": times,
                **timing.peak_memory(steps[mixer]),
                "parameters": sum(p.numel() for p in steps[mixer].block.parameters()),
                "errors": errors[mixer],
            }
        )
    config = {"width": size.width, "rnn_width": size.rnn_width, "depth": size.depth}
    return {"case": name, "batch": size.batch, "length": size.length, "config": config, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Markdown table of a result."""
    lines = [
        report.origin(result),
        "",
        "| case | mixer | step, ms | MAD | peak MiB above parameters and optimizer | parameters |",
        "|---" * 6 + "|",
    ]
    for case in result["cases"]:
        for row in case["rows"]:
            step = row["optimizer_step"]
            cells = [case["case"], row["architecture"], f"{step['median_ms']:.2f}", f"{step['mad_ms']:.3f}"]
            cells += [f"{row['peak_allocated_delta_bytes'] / MIB:,.0f}", f"{row['parameters']:,}"]
            lines.append(report.line(cells))
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> int:
    """Measures, writes JSON and table, prints the table."""
    check_positive(rounds=args.rounds, repeats=args.repeats)
    require_gpu()
    check_fp8(args.fp8, torch.device(DEVICE), "--fp8")
    check_output(args.output)
    compiled = not args.eager
    cases = [(name, mixer, compiled, args.fp8) for name in args.cases for mixer in args.architectures]
    run_beside(compile_case, cases, args.jobs)
    result: dict[str, Any] = {
        "schema_version": 1,
        "protocol": {
            "scope": "complete recurrent block forward, input/parameter backward and optimizer update",
            "optimizer": "torch.optim.AdamW(fused=True), states initialized before timing",
            "dtype": "BF16 autocast, FP32 parameters and recurrent carry",
            "fp8": args.fp8,
            "order": "AB/BA",
            "compile_and_optimizer_state_initialization_excluded": True,
            "resets": "internal: documents of 1,024 tokens on average",
        },
        "environment": timing.environment(),
        "command": report.command(),
        "cases": [],
    }
    for name in args.cases:
        result["cases"].append(measure(name, args.architectures, args.rounds, args.repeats, compiled, args.fp8))
        torch.cuda.empty_cache()
        report.write_json(args.output, result)
    report.write_table(args.output, table(result))
    return 0
