"""Correctness and timing of the RG-LRU kernels, and of variants of their plan, in one run on a GPU.

    python -m samu_lm.benchmarks.rglru_probe OUT.json --shapes 1,131072,1024 4,2048,2048 --variants variants.json

Every shape is checked against float64 before it is timed. A variant changes entries of ``kernel_plan.OPTIONS`` and
``TILE_TOKENS``; ``--warm I N`` compiles every N-th variant without running it, so that N processes can share the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samu_lm.benchmarks import timing
from samu_lm.benchmarks.float64 import relative_error
from samu_lm.benchmarks.rglru_float64 import BLOCKS, NAMES, draw, reference64
from samu_lm.ops import rglru_mixer
from samu_lm.ops.common.launch import compile_only, count_launches
from samu_lm.ops.rglru import kernel, kernel_plan

Shape = tuple[int, int, int]
_TABLES = tuple(kernel_plan.TABLES.values())
_DEFAULT_TABLES = tuple(dict(table) for table in _TABLES)
_DEFAULT_TOKENS = dict(kernel_plan.TILE_TOKENS)
_DEFAULT_FUSED = dict(kernel_plan.FUSED_CHANNELS)
_DEFAULT_PIECES = dict(kernel_plan.PIECE_TILES)


def apply_variant(variant: dict[str, Any]) -> None:
    """Sets the plan: ``{"tokens": {path: T}, "fused": channels, kernel: {option: value}}`` over the defaults."""
    kernel_plan.TILE_TOKENS.update(_DEFAULT_TOKENS)
    kernel_plan.FUSED_CHANNELS.update(_DEFAULT_FUSED)
    kernel_plan.PIECE_TILES.update(_DEFAULT_PIECES)
    for table, default in zip(_TABLES, _DEFAULT_TABLES, strict=True):
        table.update(default)
    for name, value in variant.items():
        if name == "tokens":
            kernel_plan.TILE_TOKENS.update(value)
        elif name == "fused":
            kernel_plan.FUSED_CHANNELS["gradient"] = value
        elif name == "pieces":
            kernel_plan.PIECE_TILES["all"] = value
        elif name != "resets":
            for table in _TABLES:
                table[name] = dataclasses.replace(table[name], **value)
    kernel_plan.clear_plans()


def run_forward(inputs: dict[str, Tensor]) -> Tensor:
    x, wi, bi, wa, ba, a_param = (inputs[n] for n in NAMES)
    y, _ = rglru_mixer(x, wi, bi, wa, ba, a_param, reset=inputs["first"], backend="triton")
    return y


def run_both(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward, for an incoming gradient that exists."""
    y = run_forward(inputs)
    return (y, *torch.autograd.grad(y, [inputs[n] for n in NAMES], inputs["grad_y"]))


def check(shape: Shape, dtype: torch.dtype, blocks: int = BLOCKS) -> dict[str, float]:
    """Relative error of y and every gradient against float64; infinity where a value was left unwritten."""
    inputs = draw(shape, dtype, "cuda", blocks)
    expected = reference64(inputs)
    for name in NAMES:
        inputs[name].requires_grad_()
    poison = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(4)]
    del poison
    results = dict(zip(("y", *NAMES), run_both(inputs), strict=True))
    again = run_both(inputs)
    errors = {}
    for (name, value), second in zip(results.items(), again, strict=True):
        error = relative_error(value, expected[name])
        errors[name] = error if torch.equal(value, second) and error == error else float("inf")
    return errors


def measure(shape: Shape, repeats: int, full: bool, resets: bool = True) -> dict[str, Any]:
    """Times of one shape; ``full`` adds the graph's replay, launches and peak memory."""
    inputs = draw(shape, torch.bfloat16, "cuda")
    if not resets:
        inputs["first"][:, 1:] = False
    for name in NAMES:
        inputs[name].requires_grad_()
    out: dict[str, Any] = {"kernels": timing.kernel_times(lambda: run_both(inputs))}
    if full:
        with torch.no_grad():
            out["forward_ms"] = timing.event_median(lambda: run_forward(inputs), repeats)
            out["forward_graph_ms"] = timing.graph_median(lambda: run_forward(inputs), repeats)
        out["both_ms"] = timing.event_median(lambda: run_both(inputs), repeats)
        out["both_graph_ms"] = timing.graph_median(lambda: run_both(inputs), repeats)
        with count_launches() as names:
            run_both(inputs)
        out["launches"] = names
        out["peak_mib"] = timing.peak_memory(lambda: run_both(inputs))["peak_allocated_delta_bytes"] / 2**20
    return out


def warm(jobs: list[tuple[dict[str, Any], Shape, torch.dtype, int]]) -> None:
    """Compiles what the jobs will run, without a GPU."""
    for variant, (batch, length, width), dtype, blocks in jobs:
        apply_variant(variant)
        with compile_only():
            x = torch.empty(batch, length, width, dtype=dtype)
            w = width // blocks
            weight, bias, param = torch.empty(blocks, w, w), torch.empty(blocks, w), torch.empty(width)
            first = torch.empty(batch, length, dtype=torch.bool)
            if kernel.fits(w, dtype):
                gates = (weight, bias, weight, bias, param)
                y, _, saved = kernel._mixer(x, *gates, first, None, True, "")
                kernel._mixer_backward(y, None, saved, x, *gates, first, False)
            else:
                y, _, saved = kernel._scan(x, x, x, param, first, None, True, "")
                kernel._scan_backward(y, None, saved, x, x, x, param, first, False)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="*", default=["1,131072,1024", "4,2048,2048"])
    parser.add_argument("--checks", nargs="*", default=[], help="B,L,W,blocks,dtype")
    parser.add_argument("--variants", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warm", nargs=2, type=int)
    parser.add_argument("--once", action="store_true", help="run each shape twice and stop (for a profiler)")
    options = parser.parse_args(arguments)
    shapes: list[Shape] = [tuple(map(int, s.split(","))) for s in options.shapes]  # type: ignore[misc]
    variants = json.loads(options.variants.read_text()) if options.variants else []
    checks = []
    for text in options.checks:
        *sizes, kind = text.split(",")
        checks.append((*map(int, sizes), getattr(torch, kind)))
    jobs: list[Any] = [({}, (b, n, w), kind, blocks) for b, n, w, blocks, kind in checks]
    jobs += [(v, shape, torch.bfloat16, BLOCKS) for shape in shapes for v in [{}, *variants]]
    if options.warm:
        warm(jobs[options.warm[0] :: options.warm[1]])
        return
    if options.once:
        for shape in shapes:
            inputs = draw(shape, torch.bfloat16, "cuda")
            for name in NAMES:
                inputs[name].requires_grad_()
            run_both(inputs), run_both(inputs)
        torch.cuda.synchronize()
        return
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "environment": timing.environment(),
        "copy_tb_s": timing.copy_rate(),
        "checks": [],
        "shapes": [],
    }
    apply_variant({})
    for b, n, w, blocks, kind in checks:
        errors = check((b, n, w), kind, blocks)
        report["checks"].append({"shape": [b, n, w], "blocks": blocks, "dtype": str(kind), "errors": errors})
        print(f"{(b, n, w, blocks)} {kind}", {k: f"{v:.1e}" for k, v in errors.items()}, flush=True)
    for shape in shapes:
        row: dict[str, Any] = {"shape": shape, "variants": []}
        report["shapes"].append(row)
        for variant in [{}, *variants]:
            start = time.time()
            apply_variant(variant)
            resets = variant.get("resets", True)
            try:
                result = measure(shape, options.repeats, full=not variant, resets=resets)
            except Exception as error:  # a variant that does not fit the chip is a result, too
                result = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            row["variants"].append({"variant": variant, **result})
            short = [(k.replace("_kernel", ""), round(v, 4)) for k, v in result.pop("kernels", [])]
            rest = {k: v for k, v in result.items() if k != "launches"}
            print(shape, json.dumps(variant), short, rest, f"[{time.time() - start:.1f}s]", flush=True)
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
