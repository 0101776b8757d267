"""``samu-lm bench step``: a whole training step on packed rows, loss and optimizer included, and where its time goes.

Random token ids, documents of 1,024 tokens on average, bfloat16 autocast over float32 parameters, fused AdamW. Model
FLOPs are those of ``RecurrentLM.flops_per_token``: matrix products forward and backward, nothing that is done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from samu_lm.benchmarks import report, timing
from samu_lm.benchmarks.arguments import add_fp8, check_output, check_positive
from samu_lm.benchmarks.cases import DOCUMENT, MIXERS, CheckFailed
from samu_lm.benchmarks.float64 import relative_error
from samu_lm.benchmarks.report import MIB
from samu_lm.benchmarks.shapes import require_gpu
from samu_lm.errors import ConfigError
from samu_lm.model import RecurrentLM
from samu_lm.model.fp8 import MULTIPLE, check_fp8, convert_to_fp8
from samu_lm.model.lm import CHECKPOINTING
from samu_lm.training.loss import compiled_nll, packed_nll, summed_cross_entropy
from samu_lm.training.optimizer import AdamW

DEVICE = "cuda"
SIZES = {
    "100m": {"vocab_size": 32_000, "width": 768, "rnn_width": 1024, "depth": 12},
    "400m": {"vocab_size": 32_000, "width": 1536, "rnn_width": 2048, "depth": 12},
    "1b": {"vocab_size": 32_000, "width": 2048, "rnn_width": 2560, "depth": 24},
}
# Dense bfloat16 FLOP/s that utilisation is counted against: an H100's or H200's, by their data sheet.
PEAK = 990e12
# Rows, tokens and blocks of the check.
CHECKED = (2, 256, 2)
# Relative differences from the reference. A product of float8 operands is off by some 4 %, and the layers add up.
BOUNDS = {"loss": 1e-3, "gradients": 5e-2}
FP8_BOUNDS = {"loss": 5e-3, "gradients": 0.3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench step``."""
    parser.epilog = "example: samu-lm bench step --model 400m --lengths 8192 --output step.json"
    parser.add_argument("--model", choices=list(SIZES), default="400m")
    parser.add_argument("--architectures", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768], help="tokens per row")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens per step; each length must divide it")
    parser.add_argument("--repeats", type=int, default=10, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="none", help="activation checkpointing")
    add_fp8(parser)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--no-parts", action="store_true", help="leave the breakdown out")
    parser.add_argument("--output", type=Path, default=Path("step.json"), help="JSON; table (.md) beside")


class TrainingStep:
    """A model, its optimizer and one packed batch, ready to take steps.

    Args:
        sizes: keyword arguments of the model.
        mixer: the recurrence.
        rows, length: shape of the batch.
        compiled: run model and loss under torch.compile.
        backend: of the ops.
        checkpointing: ``activation_checkpointing`` of the model.
        fp8: recipe of the blocks' linear maps.
    """

    def __init__(
        self, sizes: dict[str, Any], mixer: str, rows: int, length: int, *, compiled: bool, backend: str = "auto",
        checkpointing: str = "none", fp8: str = "none",
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = RecurrentLM(**sizes, mixer=mixer, backend=backend, activation_checkpointing=checkpointing)
            self.tokens = torch.randint(0, sizes["vocab_size"], (rows, length))
            self.reset = torch.rand(rows, length) < 1 / DOCUMENT
            self.mask = torch.ones(rows, length, dtype=torch.bool)
        convert_to_fp8(self.model.blocks, fp8)
        self.targets = self.tokens.roll(-1, 1)
        self.mask[:, -1] = False
        self.optimizer = AdamW(lr=1e-4).build(self.model)
        self.nll = compiled_nll(self.model, dynamic=False) if compiled else packed_nll

    def gradients(self) -> Tensor:
        """The loss in nats per target; gradients are left in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.nll(self.model, self.tokens, self.targets, self.reset, self.mask) / self.mask.sum()
        loss.backward()
        return loss.detach()

    def __call__(self) -> None:
        """Forward, backward, optimizer update."""
        self.gradients()
        self.optimizer.step()


def check(sizes: dict[str, int], mixer: str, compiled: bool, fp8: str = "none") -> dict[str, float]:
    """Holds loss and gradients on the kernels to the plain PyTorch definition, at the model's widths, two blocks deep.

    The definition is in bfloat16, also where the step is in float8.

    Returns:
        Relative difference of the loss, and of the gradients of all parameters together.

    Raises:
        CheckFailed: more than roundings of bfloat16, or of float8, apart.
    """
    rows, length, depth = CHECKED
    losses, gradients = [], []
    for backend in ("triton", "reference"):
        on_kernels = backend == "triton"
        step = TrainingStep(
            sizes | {"depth": depth}, mixer, rows, length, compiled=compiled and on_kernels, backend=backend,
            fp8=fp8 if on_kernels else "none",
        )  # fmt: skip
        losses.append(float(step.gradients()))
        gradients.append(torch.cat([p.grad.double().flatten() for p in step.model.parameters() if p.grad is not None]))
    errors = {
        "loss": abs(losses[0] / losses[1] - 1),
        "gradients": relative_error(gradients[0], gradients[1]),
    }
    bounds = BOUNDS if fp8 == "none" else FP8_BOUNDS
    if not all(errors[name] < bound for name, bound in bounds.items()):
        raise CheckFailed(f"{mixer}: the kernels' step differs from the reference's: {errors}")
    return errors


def _both(call: Callable[[Tensor], Tensor], x: Tensor, parameters: Iterable[Tensor]) -> Callable[[], object]:
    """A call of forward and backward of ``x -> y``, for an incoming gradient that exists."""
    leaves = [x, *parameters]
    with torch.autocast(DEVICE, torch.bfloat16):
        grad = torch.randn_like(call(x))

    def run() -> object:
        with torch.autocast(DEVICE, torch.bfloat16):
            y = call(x)
        return torch.autograd.grad(y, leaves, grad, allow_unused=True)

    return run


def parts(step: TrainingStep, compiled: bool) -> dict[str, float]:
    """Milliseconds of each part of a step, forward and backward, measured alone and times the blocks that have it."""
    block: Any = step.model.blocks[0]
    reset, rows, length = step.reset, *step.tokens.shape
    depth, width, rnn_width = len(step.model.blocks), step.model.width, step.model.rnn_width
    stream = torch.randn(rows, length, width, device=DEVICE).requires_grad_()
    channels = torch.randn(rows, length, rnn_width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()

    def projections(x: Tensor) -> Tensor:
        n = block.norm(x)
        return x + block.linear_out(block.linear_x(n) * F.gelu(block.linear_y(n), approximate="tanh"))

    def mlp(x: Tensor) -> Tensor:
        return x + block.mlp(block.mlp_norm(x))

    def convolution(u: Tensor) -> Tensor:
        return block.conv(u, reset, None)[0]

    def mixer(u: Tensor) -> Tensor:
        return block.mixer(u, reset)

    def loss(x: Tensor) -> Tensor:
        return summed_cross_entropy(step.model.final_norm(x), step.targets, step.mask, step.model.output_weight)

    def of(*modules: Any) -> list[Tensor]:
        return [p for module in modules for p in module.parameters()]

    cases: dict[str, tuple[int, Callable[[Tensor], Tensor], Tensor, list[Tensor]]] = {
        "projections": (depth, projections, stream, of(block.norm, block.linear_x, block.linear_y, block.linear_out)),
        "convolution": (depth, convolution, channels, of(block.conv)),
        "mixer": (depth, mixer, channels, of(block.mixer)),
        "mlp": (depth, mlp, stream, of(block.mlp_norm, block.mlp)),
        "loss": (1, loss, stream, of(step.model.final_norm, step.model.embedding)),
    }
    measured = {}
    for name, (count, call, x, parameters) in cases.items():
        fast = torch.compile(call, dynamic=False) if compiled and name in ("projections", "mlp", "loss") else call
        measured[name] = count * timing.queued_median(_both(fast, x, parameters))
    measured["optimizer"] = timing.queued_median(step.optimizer.step)
    return measured


def measure(args: argparse.Namespace, mixer: str, length: int, errors: dict[str, float]) -> dict[str, Any]:
    """The row of one mixer and row length."""
    torch._dynamo.reset()
    compiled = not args.eager
    rows = args.tokens // length
    step = TrainingStep(
        SIZES[args.model], mixer, rows, length, compiled=compiled, checkpointing=args.checkpointing, fp8=args.fp8
    )
    samples, peak = timing.samples_and_peak(step, args.repeats, args.warmup)
    milliseconds = timing.median(samples)
    flops = step.model.flops_per_token() * args.tokens
    row: dict[str, Any] = {
        "architecture": mixer,
        "rows": rows,
        "length": length,
        "samples_ms": samples,
        "median_ms": milliseconds,
        "tokens_per_second": args.tokens / milliseconds * 1e3,
        "model_flops": flops,
        "utilisation": flops / (milliseconds / 1e3) / PEAK,
        **peak,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "errors": errors,
    }
    if not args.no_parts:
        row["parts_ms"] = parts(step, compiled)
        row["parts_ms"]["rest"] = milliseconds - sum(row["parts_ms"].values())
    return row


def table(result: dict[str, Any]) -> str:
    """Markdown tables of a result: speed, then parts in ms and percent of the step."""
    lines = [
        report.origin(result),
        "",
        f"`{result['model']}`, {result['tokens']:,} tokens a step; utilisation against {PEAK / 1e12:.0f} TFLOP/s.",
        "",
        "| mixer | rows | step, ms | tokens/s | utilisation | peak MiB |",
        "|---" * 6 + "|",
    ]
    for row in result["rows"]:
        cells = [row["architecture"], f"{row['rows']} x {row['length']:,}", f"{row['median_ms']:.1f}"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['utilisation']:.1%}"]
        cells += [f"{row['peak_allocated_bytes'] / MIB:,.0f}"]
        lines.append(report.line(cells))
    split = [row for row in result["rows"] if "parts_ms" in row]
    if split:
        names = list(split[0]["parts_ms"])
        lines += ["", "Parts in ms, each measured alone; rest is what the step takes beyond their sum.", ""]
        lines += ["| mixer | rows | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
        for row in split:
            share = [f"{row['parts_ms'][n]:.1f} ({row['parts_ms'][n] / row['median_ms']:.0%})" for n in names]
            lines.append(report.line([row["architecture"], f"{row['rows']} x {row['length']:,}", *share]))
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> int:
    """Measures, writes JSON and table, prints the table."""
    check_positive(repeats=args.repeats, warmup=args.warmup, tokens=args.tokens)
    for length in args.lengths:
        if length < 2 or args.tokens % length:
            raise ConfigError("--lengths", length, f"must be at least 2 and divide --tokens={args.tokens}")
    if args.fp8 != "none" and args.tokens % MULTIPLE:
        raise ConfigError("--tokens", args.tokens, f"must be a multiple of {MULTIPLE} with --fp8 {args.fp8}")
    require_gpu()
    check_fp8(args.fp8, torch.device(DEVICE), "--fp8")
    check_output(args.output)
    result: dict[str, Any] = {
        "schema_version": 1,
        "protocol": {
            "scope": "whole training step: embedding, blocks, loss, backward, fused AdamW",
            "dtype": "bfloat16 autocast, float32 parameters and recurrent carry",
            "compile": not args.eager,
            "fp8": args.fp8,
            "activation_checkpointing": args.checkpointing,
            "resets": "internal: documents of 1,024 tokens on average",
            "flops": "RecurrentLM.flops_per_token",
        },
        "environment": timing.environment(),
        "command": report.command(),
        "model": args.model,
        "tokens": args.tokens,
        "rows": [],
    }
    for mixer in args.architectures:
        errors = check(SIZES[args.model], mixer, not args.eager, args.fp8)
        for length in args.lengths:
            result["rows"].append(measure(args, mixer, length, errors))
            torch.cuda.empty_cache()
            report.write_json(args.output, result)
    report.write_table(args.output, table(result))
    return 0
