"""``ssd`` at the size of a long row on one GPU, beside ``chunked`` and the GPU's own ceilings, all in one run."""

from __future__ import annotations

from typing import Any

import torch

from samu_lm.benchmarks import delta_cases as cases
from samu_lm.benchmarks import timing
from samu_lm.benchmarks.statistics import summary

BATCH, LENGTH, HEADS, D, CHUNK = 1, 32_768, 16, 128, 64
# Largest relative error of output and gradients against float64 that is timed at all: bfloat16's own rounding.
BOUND = 2e-2


def matmul_rate(size: int = 8192) -> float:
    """bfloat16 matrix product in TFLOP/s."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (timing.event_median(lambda: a @ b, 10) * 1e9)


def chunk_flops(c: int, dk: int, dv: int) -> tuple[int, int]:
    """FLOPs in matrix products of one chunk and head, forward and backward, as ``ssd`` multiplies them out.

    The triangular inverse counts as a third of a product of C x C matrices.
    """
    pairs, state, inverse = 2 * c * c, 2 * c * dk * dv, 2 * c**3 // 3
    forward = pairs * (2 * dk + 2 * dv) + 3 * state + inverse
    backward = pairs * (2 * dk + dv) + state + inverse  # worked out again
    backward += pairs * (4 * dv + 4 * dk) + 6 * state
    return forward, backward


def least_bytes() -> tuple[int, int]:
    """Bytes of q, k, v, o and their gradients in bfloat16 that no implementation can avoid, forward and both."""
    tensor = 2 * BATCH * LENGTH * HEADS * D
    return 4 * tensor, (4 + 8) * tensor


def measure(repeats: int) -> dict[str, Any]:
    """Times of ``ssd`` and ``chunked``, with fractions of the matmul and copy ceilings.

    Raises:
        RuntimeError: an implementation is further from float64 than :data:`BOUND`.
    """
    inputs, grad_o = cases.draw(BATCH, LENGTH, HEADS, D, torch.bfloat16, "cuda")
    expected = cases.truth(inputs, grad_o, CHUNK)
    matmul, copy = matmul_rate(), timing.copy_rate()
    flops = chunk_flops(CHUNK, D, D)
    chunks = BATCH * HEADS * LENGTH // CHUNK
    work = {"fwd": flops[0] * chunks, "fwd_bwd": sum(flops) * chunks}
    moved = dict(zip(cases.MODES, least_bytes(), strict=True))
    rows = []
    for impl in ("ssd", "chunked"):
        for mode in cases.MODES:

            def run(impl: str = impl, mode: str = mode) -> list[torch.Tensor]:
                return cases.call(inputs, grad_o, mode, impl, CHUNK)

            errors = cases.relative_errors(run(), expected)
            if not max(errors) < BOUND:
                raise RuntimeError(f"{impl} {mode}: relative errors {errors} against float64, bound {BOUND}")
            times = summary(timing.event_samples(run, repeats))
            seconds = times["median_ms"] / 1e3
            rows.append(
                {
                    "impl": impl,
                    "mode": mode,
                    **times,
                    "rel_err": errors,
                    "fraction_of_matmul": work[mode] / seconds / (matmul * 1e12),
                    "fraction_of_copy": moved[mode] / seconds / (copy * 1e12),
                    **timing.peak_memory(run),
                }
            )
    return {
        "shape": {"batch": BATCH, "seq": LENGTH, "heads": HEADS, "dk": D, "dv": D, "chunk_size": CHUNK},
        "dtype": "bfloat16",
        "matmul_tflop_s": matmul,
        "copy_tb_s": copy,
        "flops": work,
        "least_bytes": moved,
        "results": rows,
    }
