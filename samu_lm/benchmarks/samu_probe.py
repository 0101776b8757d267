"""Correctness of the SAMU kernels and times of many plans, in one run on a GPU.

    python -m samu_lm.benchmarks.samu_probe OUT.json --plans plans.json

plans.json: ``{"B,L,W": {name: {field of Plan: value}}}``. A plan is checked against float64 at a small shape of the
same width before it is timed. ``--warm I N`` only compiles every N-th plan, so that N processes can share the work.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samu_lm.benchmarks import timing
from samu_lm.benchmarks.float64 import NAMES, draw_mixer, mixer64
from samu_lm.ops import samu_mixer
from samu_lm.ops.common.launch import compile_only, count_launches
from samu_lm.ops.samu import kernel_passes as passes
from samu_lm.ops.samu.kernel_plan import Plan, use_plan

Shape = tuple[int, int, int]


def forward(inputs: dict[str, Tensor], first: Tensor | None) -> Tensor:
    return samu_mixer(*inputs.values(), reset=first, backend="triton")[0]


def both(inputs: dict[str, Tensor], first: Tensor | None, grad_y: Tensor) -> tuple[Tensor, ...]:
    y = forward(inputs, first)
    return (y, *torch.autograd.grad(y, list(inputs.values()), grad_y))


def check(shape: Shape, dtype: torch.dtype, amplitude: float = 0.5) -> dict[str, float]:
    """Relative errors against float64; infinity where two runs differ or a value is not finite."""
    inputs, first, grad_y = draw_mixer(shape, dtype, "cuda", document=300, amplitude=amplitude)
    for t in inputs.values():
        t.requires_grad_()
    poison = [torch.full(shape, float("nan"), device="cuda") for _ in range(6)]
    del poison
    results, again = both(inputs, first, grad_y), both(inputs, first, grad_y)
    # A state within rounding of 0 may fall on either side of the rectifier: gradients are compared on the same side.
    expected = mixer64(inputs, first, grad_y, through=results[0] > 0)
    errors = {}
    for name, value, second in zip(("y", *NAMES), results, again, strict=True):
        error = float((value.detach().double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-30))
        errors[name] = error if torch.equal(value, second) and error == error else float("inf")
    return errors


def measure(shape: Shape, repeats: int, profile: bool) -> dict[str, Any]:
    """Times of one shape under the plan in force, internal resets on."""
    inputs, first, grad_y = draw_mixer(shape, torch.bfloat16, "cuda")
    for t in inputs.values():
        t.requires_grad_()
    out: dict[str, Any] = {"forward_ms": timing.event_median(lambda: forward(inputs, first), repeats)}
    out["both_ms"] = timing.event_median(lambda: both(inputs, first, grad_y), repeats)
    with torch.no_grad():
        out["graph_forward_ms"] = timing.graph_median(lambda: forward(inputs, first), repeats)
    out["graph_ms"] = timing.graph_median(lambda: both(inputs, first, grad_y), repeats)
    out["peak_mib"] = timing.peak_memory(lambda: both(inputs, first, grad_y))["peak_allocated_delta_bytes"] / 2**20
    out["host_ms"] = timing.host_time(lambda: both(inputs, first, grad_y))
    if profile:
        out["kernels"] = timing.kernel_times(lambda: both(inputs, first, grad_y))
    with count_launches() as names:
        both(inputs, first, grad_y)
    out["launches"] = len(names)
    return out


def read_plans(path: Path) -> list[tuple[Shape, str, Plan]]:
    """All (shape, name, plan) of a file of plans."""
    named = json.loads(path.read_text())
    out = []
    for key, plans in named.items():
        batch, length, width = map(int, key.split(","))
        out += [((batch, length, width), name, Plan(**fields)) for name, fields in plans.items()]
    return out


def small(shape: Shape) -> Shape:
    """Where plans of this shape are checked: several rows, chunks and groups, a ragged end."""
    return (2, 1500, shape[2])


def warm(plans: list[tuple[Shape, str, Plan]], index: int, count: int) -> None:
    """Compiles every ``count``-th plan without running it, for its shape and for the check."""
    for shape, _, plan in plans[index::count]:
        for size, dtype in ((shape, torch.bfloat16), (small(shape), torch.bfloat16), (small(shape), torch.float32)):
            with use_plan(plan), compile_only():
                compile_mixer(size, dtype)


def compile_mixer(shape: Shape, dtype: torch.dtype) -> None:
    """Forward and backward of the mixer on tensors without storage, under ``compile_only``."""
    batch, length, width = shape

    def hollow(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    modes, bias = width // 2, width + 1
    vectors = hollow(modes), hollow(modes), hollow(bias), hollow(bias)
    parameters = passes.Parameters(*vectors, hollow(), hollow())
    x, first = hollow(*shape, dtype=dtype), hollow(batch, length, dtype=torch.bool)
    y, _, saved = passes.mixer_forward(x, parameters, first, None, True)
    passes.mixer_backward(y, None, x, parameters, saved, False)


def _line(shape: Shape, name: str, m: dict[str, Any]) -> str:
    head = f"{shape} {name:8s} fwd {m['forward_ms']:.3f} both {m['both_ms']:.3f} graph {m['graph_forward_ms']:.3f} "
    head += f"{m['graph_ms']:.3f} host {m['host_ms']:.3f} peak {m['peak_mib']:.0f} launches {m['launches']}"
    kernels = " ".join(f"{k.replace('_kernel', '')} {v * 1e3:.0f}" for k, v in m.get("kernels", []) if "at::" not in k)
    return head + (f"\n    {kernels}" if kernels else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--warm", type=int, nargs=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--accuracy", action="store_true", help="also print float32 errors at long lengths")
    args = parser.parse_args()
    plans = read_plans(args.plans)
    if args.warm:
        warm(plans, *args.warm)
        return
    began = time.monotonic()
    record: dict[str, Any] = {"environment": timing.environment(), "copy_tb_s": timing.copy_rate(), "plans": []}
    lines = [f"copy {record['copy_tb_s']:.2f} TB/s"]
    for shape, name, plan in plans:
        with use_plan(plan):
            errors = {str(d): check(small(shape), d) for d in (torch.float32, torch.bfloat16)}
            worst32, worst16 = (max(e.values()) for e in errors.values())
            entry: dict[str, Any] = {"shape": shape, "name": name, "plan": vars(plan), "errors": errors}
            if errors["torch.float32"]["y"] < 2e-6 and worst32 < 1e-4 and worst16 < 2e-2:
                entry.update(measure(shape, args.repeats, profile=True))
                lines.append(_line(shape, name, entry))
            else:
                lines.append(f"WRONG {shape} {name} {errors}")
        record["plans"].append(entry)
        print(f"{time.monotonic() - began:.0f} s {shape} {name} f32 {worst32:.1e} bf16 {worst16:.1e}", flush=True)
        args.out.write_text(json.dumps(record, indent=1))
    if args.accuracy:
        for shape, amplitude in (((1, 4096, 1024), 0.5), ((1, 4096, 2048), 0.0), ((1, 131072, 1024), 0.5)):
            found = check(shape, torch.float32, amplitude)
            record.setdefault("accuracy", {})[f"{shape} {amplitude}"] = found
            lines.append(f"{shape} amplitude {amplitude} " + " ".join(f"{k} {v:.1e}" for k, v in found.items()))
            torch.cuda.empty_cache()
    args.out.write_text(json.dumps(record, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
