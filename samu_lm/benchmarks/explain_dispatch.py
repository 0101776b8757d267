"""``samu-lm explain-dispatch B L W``: which kernels each mixer of this shape runs on a GPU, and why."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from samu_lm.benchmarks.shapes import parse_shapes
from samu_lm.errors import ConfigError
from samu_lm.ops.common import dispatch
from samu_lm.ops.rglru import kernel_plan as rglru_plan
from samu_lm.ops.samu.kernel_plan import OP, Plan, plan_for

BLOCKS = 16
DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm explain-dispatch``."""
    parser.epilog = "example: samu-lm explain-dispatch 1 32768 1024"
    for name, text in (("batch", "rows"), ("length", "tokens per row"), ("width", "width of the recurrence")):
        parser.add_argument(name, help=text)
    parser.add_argument("--blocks", type=int, help="gate blocks of the RG-LRU (default 16)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of the activations")


def explain_samu(batch: int, length: int, width: int) -> list[str]:
    """What a SAMU mixer runs: the calibrated choice, the runner-up and its margin, and the plan for this shape."""
    path = dispatch.record_path(OP)
    environment, entries = dispatch.read_record(path)
    found = dispatch.choose(entries, batch, length, width)
    lines = [f"SAMU mixer at (B, L, W) = ({batch}, {length}, {width})"]
    if found is None:
        lines.append(
            f"  no calibration record ({path.name}): the built-in rule decides; `samu-lm calibrate` writes one"
        )
    else:
        same = (found.batch, found.length, found.width) == (batch, length, width)
        where = "measured" if same else f"nearest measured: ({found.batch}, {found.length}, {found.width})"
        gpu, torch_version, triton_version = (environment[k] for k in ("gpu", "torch", "triton"))
        lines += [
            f"  {where}, on {gpu}, torch {torch_version}, triton {triton_version}",
            f"  runs      {found.choice}: {found.milliseconds:.3f} ms forward + backward there",
            f"  runner-up {found.runner_up}: {_margin(found.margin)}",
        ]
    plan = plan_for(batch, length, width)
    default = asdict(Plan())
    changed = ", ".join(f"{k}={v}" for k, v in asdict(plan).items() if v != default[k] or k == "chunk")
    lines.append(f"  plan      {changed} (the others are Plan's defaults)")
    return lines


def _margin(margin: float) -> str:
    """How much longer the runner-up takes, in words where it does not."""
    if margin >= 0:
        return f"+{margin:.1%}"
    return f"{-margin:.1%} faster, takes more memory (within 3% of the fastest the least time x memory runs)"


def explain_rglru(batch: int, length: int, width: int, blocks: int, dtype: torch.dtype) -> list[str]:
    """What an RG-LRU mixer runs: gates inside the scan, or the two-step path; and how a row is cut."""
    kind = str(dtype).removeprefix("torch.")
    w = width // blocks
    lines = [f"RG-LRU mixer at (B, L, W) = ({batch}, {length}, {width}), {blocks} gate blocks of {w}, {kind}"]
    fused = rglru_plan.fits(w, dtype)
    if fused:
        gradients = (
            "in the gradient kernel" if w <= rglru_plan.FUSED_CHANNELS["gradient"] else "by a kernel of their own"
        )
        lines.append(f"  runs      gates inside the scan; weight gradients {gradients}")
    else:
        lines.append(
            f"  runs      two steps: the gates are projected first, the scan reads their logits (blocks of at most "
            f"{rglru_plan.WIDEST_BLOCK[dtype]} channels fit the scan for {kind})"
        )
    problem = rglru_plan.problem_for((batch, length, width), w if fused else 0, dtype, True, False, None)
    for name, kernel, split in (("forward", "forward", problem.forward), ("backward", "gradient", problem.backward)):
        tile = problem.tile(kernel)
        lines.append(
            f"  {name:9s} segments a row: {split.segments}, of {split.pieces_per_segment} pieces of "
            f"{split.tiles_per_piece} tiles of {tile.T} tokens by {tile.M} channels"
        )
    lines.append(
        "  rule      by the blocks' width and type, as measured (docs/kernels-rglru.md); there is no runner-up"
    )
    return lines


def run(args: argparse.Namespace) -> int:
    """Prints the explanation."""
    ((batch, length, width),) = parse_shapes([f"{args.batch},{args.length},{args.width}"], key="B,L,W")
    blocks = BLOCKS if args.blocks is None else args.blocks
    if args.blocks is not None and (blocks < 1 or width % blocks):
        raise ConfigError("--blocks", blocks, f"must divide the width {width}")
    lines = explain_samu(batch, length, width)
    if width % blocks:
        lines.append(f"RG-LRU mixer: {BLOCKS} gate blocks do not divide the width {width}; name others with --blocks")
    else:
        lines += explain_rglru(batch, length, width, blocks, getattr(torch, args.dtype))
    print("\n".join(lines))
    return 0
