"""``samu-lm bench decode``: tokens a second, one token after another, as a CUDA graph.

Matrices are bfloat16, the recurrences' own parameters and states and the residual stream float32. The ceiling is the
time to move the bytes of every parameter once, at the copy rate measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samu_lm.benchmarks import decode_plans, report, timing
from samu_lm.benchmarks.arguments import check_output, check_positive
from samu_lm.benchmarks.cases import MIXERS, CheckFailed
from samu_lm.benchmarks.float64 import relative_error
from samu_lm.benchmarks.shapes import require_gpu
from samu_lm.benchmarks.step import SIZES
from samu_lm.model import Decoder, RecurrentLM
from samu_lm.ops.decode import Plan, default_plan

DEVICE = "cuda"
# Tokens that are compared with a parallel pass before anything is timed.
CHECKED = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench decode``."""
    parser.epilog = "example: samu-lm bench decode --model 400m --batch-sizes 1 8 --output decode.json"
    parser.add_argument("--model", choices=list(SIZES), default="400m")
    parser.add_argument("--architectures", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1], help="rows decoded together, at most 16")
    parser.add_argument("--repeats", type=int, default=100, help="steps that are timed (100)")
    parser.add_argument("--output", type=Path, default=Path("decode.json"), help="JSON; table (.md) beside")
    parser.add_argument(
        "--candidates",
        type=Path,
        help='JSON of plans, {"name": {"output": [4, 4, 256]}, ...}: time them for one row, take the best',
    )
    parser.add_argument("--search", action="store_true", help="try sizes of each kernel for one row, take the best")


def start(decoder: Decoder) -> Callable[[], Any]:
    """The call that advances a decoder: a CUDA graph's replay."""
    return decoder.capture().advance


def build(sizes: dict[str, Any], mixer: str) -> RecurrentLM:
    """The model with bfloat16 matrices."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = RecurrentLM(**sizes, mixer=mixer).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(torch.bfloat16)
    return model


@torch.no_grad()
def check(model: RecurrentLM, plan: Plan, batch: int) -> float:
    """Holds decoded logits to a parallel pass over the same tokens, in float32 with the same weights.

    A parallel pass in bfloat16 rounds its residual stream and would be further off than what it is to check.

    Args:
        model: the model.
        plan: sizes of the decoder's kernels.
        batch: rows decoded together.

    Returns:
        The relative difference of the logits.

    Raises:
        CheckFailed: more than roundings of bfloat16 apart.
    """
    decoder = Decoder(model, batch, plan)
    decoder.tokens.copy_(model.vocab_size - 1 - torch.arange(batch) % model.vocab_size)
    advance = start(decoder)
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    for _ in range(CHECKED):
        tokens.append(decoder.tokens.clone())
        advance()
        logits.append(decoder.last_logits.clone())
    expected = copy.deepcopy(model).float()(torch.stack(tokens, 1))
    error = relative_error(torch.stack(logits, 1), expected)
    if not error < 2e-2:
        raise CheckFailed(f"{model.mixer}: decoded logits are {error:.1e} from the parallel pass's (bound 2e-02)")
    return error


def measure(model: RecurrentLM, plan: Plan, batches: list[int], repeats: int, copy_tb_s: float) -> list[dict[str, Any]]:
    """Rows of one mixer, by batch size; ``plan`` is for one row."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ceiling = copy_tb_s * 1e12 / size
    rows = []
    for batch in batches:
        chosen = plan if batch == 1 else default_plan(model.mixer, batch)
        error = check(model, chosen, batch)
        samples = timing.event_samples(start(Decoder(model, batch, chosen)), repeats)
        steps = 1e3 / timing.median(samples)
        rows.append(
            {
                "architecture": model.mixer,
                "batch": batch,
                "samples_ms": samples,
                "tokens_per_second": steps * batch,
                "parameter_bytes": size,
                "steps_per_second": steps,
                "ceiling_steps_per_second": ceiling,
                "fraction_of_ceiling": steps / ceiling,
                "error": error,
                "plan": chosen.as_dict(),
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    """Markdown table of a result."""
    lines = [
        report.origin(result),
        "",
        f"`{result['model']}`; the ceiling reads every parameter once a step.",
        "",
        "| mixer | rows | tokens/s | steps/s | of the ceiling |",
        "|---" * 5 + "|",
    ]
    for row in result["rows"]:
        cells = [row["architecture"], str(row["batch"]), f"{row['tokens_per_second']:,.0f}"]
        cells += [f"{row['steps_per_second']:,.0f}", f"{row['fraction_of_ceiling']:.0%}"]
        lines.append(report.line(cells))
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> int:
    """Measures, writes JSON and table, prints the table."""
    check_positive(batch_sizes=args.batch_sizes, repeats=args.repeats)
    require_gpu()
    check_output(args.output)
    ceiling = timing.copy_rate()
    result: dict[str, Any] = {
        "schema_version": 1,
        "environment": timing.environment(),
        "command": report.command(),
        "copy_tb_s": ceiling,
        "model": args.model,
        "rows": [],
        "parts_ms": {},
    }
    candidates = decode_plans.read(args.candidates) if args.candidates else {}
    for mixer in args.architectures:
        model, plan = build(SIZES[args.model], mixer), default_plan(mixer)
        if candidates or args.search:
            plan, tried = decode_plans.best(model, plan, candidates, args.search, start)
            result.setdefault("candidates", []).extend(tried)
        result["rows"] += measure(model, plan, args.batch_sizes, args.repeats, ceiling)
        result["parts_ms"][mixer] = decode_plans.parts(model, plan)
        report.write_json(args.output, result)
    report.write_table(args.output, table(result))
    return 0
