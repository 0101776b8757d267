"""Correctness and timing of the RG-LRU kernels, and of variants of their plan, in one run on a GPU.

    python -m samu_lm.benchmarks.rglru_probe OUT.json --shapes 1,131072,1024 4,2048,2048 --variants variants.json

Every shape is checked against float64 before it is timed. A variant changes entries of ``kernel_plan.OPTIONS`` and
``TILE_TOKENS``; ``--warm I N`` compiles every N-th variant without running it, so that N processes can share the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from samu_lm.ops import rglru_mixer
from samu_lm.ops.common.launch import compile_only, count_launches
from samu_lm.ops.rglru import kernel, kernel_plan

BLOCKS = 16
Shape = tuple[int, int, int]
_TABLES = (kernel_plan.OPTIONS, kernel_plan.WIDE_OPTIONS, kernel_plan.WIDEST_OPTIONS)
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


def draw(shape: Shape, dtype: torch.dtype, device: str, blocks: int = BLOCKS) -> dict[str, Tensor]:
    """Inputs as at initialisation, packed documents of about 1,000 tokens; weights already rounded to ``dtype``."""
    batch, length, width = shape
    w = width // blocks
    gen = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device)

    first = torch.rand(batch, length, generator=gen, device=device) < 1e-3
    first[:, 0] = True
    squared = 0.81 + 0.188 * torch.rand(width, generator=gen, device=device)
    return {
        "x": normal(*shape).to(dtype),
        "input_gate_weight": (normal(blocks, w, w) * w**-0.5).to(dtype).float(),
        "input_gate_bias": normal(blocks, w) * 0.3,
        "a_gate_weight": (normal(blocks, w, w) * w**-0.5).to(dtype).float(),
        "a_gate_bias": normal(blocks, w) * 0.3,
        "a_param": torch.log(torch.expm1(-torch.log(squared) / 2)),
        "first": first,
        "grad_y": normal(*shape).to(dtype),
    }


def scan64(a: Tensor, v: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + v_t along dimension 1 by doubling."""
    distance = 1
    while distance < a.shape[1]:
        v = torch.cat([v[:, :distance], v[:, distance:] + a[:, distance:] * v[:, :-distance]], 1)
        a = torch.cat([a[:, :distance], a[:, distance:] * a[:, :-distance]], 1)
        distance *= 2
    return v


def reference64(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and every gradient in float64, from the equations."""
    x, dy = inputs["x"].double(), inputs["grad_y"].double()
    wi, bi, wa, ba, param = (
        inputs[n].double() for n in ("input_gate_weight", "input_gate_bias", "a_gate_weight", "a_gate_bias", "a_param")
    )
    blocks, w = bi.shape
    split = x.view(-1, blocks, w).transpose(0, 1)
    i = torch.baddbmm(bi[:, None], split, wi).sigmoid().transpose(0, 1).reshape(x.shape)
    r = torch.baddbmm(ba[:, None], split, wa).sigmoid().transpose(0, 1).reshape(x.shape)
    rate = -8 * torch.nn.functional.softplus(param)
    mask = inputs["first"][..., None]
    a = (r * rate).exp()
    z = -torch.expm1(2 * r * rate)
    b = z.sqrt().masked_fill(mask, 1)
    decay = a.masked_fill(mask, 0)
    h = scan64(decay, b * i * x)
    follow = torch.cat([torch.zeros_like(decay[:, :1]), decay[:, 1:].flip(1)], 1)
    g = scan64(follow, dy.flip(1)).flip(1)
    del follow
    before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
    d_log_a = g * decay * before - (g * i * x * 2 * a * a / (4 * z).clamp(min=1e-6).sqrt()).masked_fill(mask, 0)
    d_li, d_la = g * b * x * i * (1 - i), d_log_a * rate * r * (1 - r)
    rows_i, rows_a = (t.view(-1, blocks, w).transpose(0, 1) for t in (d_li, d_la))
    back = torch.bmm(rows_i, wi.transpose(1, 2)) + torch.bmm(rows_a, wa.transpose(1, 2))
    return {
        "y": h,
        "x": g * b * i + back.transpose(0, 1).reshape(x.shape),
        "input_gate_weight": torch.bmm(split.transpose(1, 2), rows_i),
        "input_gate_bias": rows_i.sum(1),
        "a_gate_weight": torch.bmm(split.transpose(1, 2), rows_a),
        "a_gate_bias": rows_a.sum(1),
        "a_param": -8 * (d_log_a * r).sum((0, 1)) * param.sigmoid(),
    }


NAMES = ("x", "input_gate_weight", "input_gate_bias", "a_gate_weight", "a_gate_bias", "a_param")


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
        error = ((value.double() - expected[name]).norm() / expected[name].norm()).item()
        errors[name] = error if torch.equal(value, second) and error == error else float("inf")
    return errors


def event_median(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call between device events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    ordered = sorted(s.elapsed_time(e) for s, e in times)
    return ordered[len(ordered) // 2]


def graph_median(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return event_median(graph.replay, repeats)


def kernel_times(call: Callable[[], Any], repeats: int = 10) -> dict[str, float]:
    """Milliseconds per call of every kernel by name, from the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans[event.name.split("(")[0][:40]].append(event.device_time)
    out = {}
    for name, times in spans.items():
        per_call = max(1, round(len(times) / repeats))
        for position in range(per_call):
            mine = sorted(times[position::per_call])
            out[name + (f"#{position}" if per_call > 1 else "")] = mine[len(mine) // 2] / 1000
    return out


def copy_rate() -> float:
    """Device copy in TB/s, bytes read plus bytes written."""
    source = torch.empty(2**31, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (event_median(lambda: target.copy_(source), 10) * 1e9)


def measure(shape: Shape, repeats: int, full: bool, resets: bool = True) -> dict[str, Any]:
    """Times of one shape; ``full`` adds the graph's replay, launches and peak memory."""
    inputs = draw(shape, torch.bfloat16, "cuda")
    if not resets:
        inputs["first"][:, 1:] = False
    for name in NAMES:
        inputs[name].requires_grad_()
    out: dict[str, Any] = {"kernels": kernel_times(lambda: run_both(inputs))}
    if full:
        with torch.no_grad():
            out["forward_ms"] = event_median(lambda: run_forward(inputs), repeats)
            out["forward_graph_ms"] = graph_median(lambda: run_forward(inputs), repeats)
        out["both_ms"] = event_median(lambda: run_both(inputs), repeats)
        out["both_graph_ms"] = graph_median(lambda: run_both(inputs), repeats)
        with count_launches() as names:
            run_both(inputs)
        out["launches"] = names
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        keep = run_both(inputs)
        out["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del keep
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
                y, _, saved = kernel._mixer(x, *gates, first, None, True)
                kernel._mixer_backward(y, None, saved, x, *gates, first, False)
            else:
                y, _, saved = kernel._scan(x, x, x, param, first, None, True)
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
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "copy_tb_s": copy_rate(),
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
            short = {k.replace("_kernel", ""): round(v, 4) for k, v in result.pop("kernels", {}).items()}
            rest = {k: v for k, v in result.items() if k != "launches"}
            print(shape, json.dumps(variant), short, rest, f"[{time.time() - start:.1f}s]", flush=True)
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
