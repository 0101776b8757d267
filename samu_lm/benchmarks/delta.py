"""``samu-lm bench delta``: the gated delta rule's implementations, forward and forward + backward.

The JSON has the seed's fields: per row median and quartiles over ``repeats`` samples of ``inner`` calls each, peak
temporaries, residuals, relative errors. ``xla_temp_mb`` keeps its name: it is the allocator's peak less the results, in
MiB, for every implementation of this project; JAX's rows have none. ``rel_err`` is the worst of output and gradients,
against float64. ``cpu_ms`` is the processor time of all threads, which other work on the machine changes less. The
implementations of a shape are sampled in turn.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samu_lm.benchmarks import delta_cases as cases
from samu_lm.benchmarks.arguments import check_output, check_positive
from samu_lm.benchmarks.delta_cases import MIB, MODES, NAMES, Timed
from samu_lm.benchmarks.delta_table import JAX, table
from samu_lm.benchmarks.report import write_json, write_table
from samu_lm.environment import environment
from samu_lm.errors import ConfigError
from samu_lm.ops.gated_delta import CHUNK_SIZES, IMPLEMENTATIONS

# Tokens of a differentiated token loop whose temporaries are measured: a profiler's records of more fill the memory.
_PROFILED = 1024
# Autograd through the token loop keeps several states a token; beyond this many bytes of states the row is left out.
_MOST_STATES = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench delta``."""
    parser.epilog = "example: samu-lm bench delta --seq-lens 512 --dims 64 --output delta.json"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="channels of keys and of values")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--chunk-size", type=int, choices=CHUNK_SIZES, default=64)
    parser.add_argument("--impls", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--jax", action="store_true", help="also a chunked version in JAX (the extra `bench`)")
    parser.add_argument("--repeats", type=int, default=7, help="samples per row")
    parser.add_argument(
        "--scale", action="store_true", help="on a GPU: ssd and chunked, bf16, B=1 T=32768 H=16 d=128, with ceilings"
    )
    parser.add_argument("--output", type=Path, default=Path("delta.json"), help="JSON; table (.md) beside")


def _too_slow(args: argparse.Namespace, impl: str, mode: str, seq: int, d: int) -> bool:
    """Rows left out: the token loop at lengths where it takes minutes or the machine's memory."""
    if impl != "recurrent":
        return False
    states = 4 * args.batch * args.heads * seq * d * d
    return seq > 2048 or (mode == "fwd_bwd" and states > _MOST_STATES)


def _row(args: argparse.Namespace, impl: str, mode: str, seq: int, d: int) -> dict[str, Any]:
    return {
        "impl": impl, "mode": mode, "batch": args.batch, "heads": args.heads, "seq": seq, "dk": d, "dv": d,
        "dtype": args.dtype, "chunk_size": args.chunk_size,
    }  # fmt: skip


def _measured(timed: Timed, results: list[Tensor], expected: list[Tensor], first_s: float) -> None:
    row, errors = timed.row, cases.relative_errors(results, expected)
    row.update(compile_s=first_s, rel_err=max(errors))
    if row["mode"] == "fwd_bwd":
        row["rel_err_grads"] = dict(zip(NAMES, errors[1:], strict=True))


def _prepare(
    args: argparse.Namespace,
    impl: str,
    mode: str,
    inputs: list[Tensor],
    grad_o: Tensor,
    run: Callable[[], list[Tensor]],
) -> Timed:
    """A row with everything but its times."""
    seq, d = inputs[0].shape[1], inputs[0].shape[3]
    timed = Timed(_row(args, impl, mode, seq, d), run)
    if impl == "ssd" and args.device == "cpu":
        try:
            run()
        except RuntimeError as error:
            timed.row["error"] = f"RuntimeError: {error}"
        return timed
    start = time.perf_counter()
    results = run()
    first_s = time.perf_counter() - start
    _measured(timed, results, cases.truth(inputs, grad_o, args.chunk_size), first_s)
    if impl == JAX:
        return timed
    out = sum(x.nbytes for x in results)
    arguments = sum(x.nbytes for x in inputs) + (grad_o.nbytes if mode == "fwd_bwd" else 0)
    del results
    timed.row.update(xla_arg_mb=arguments / MIB, xla_out_mb=out / MIB)
    if not (impl == "recurrent" and mode == "fwd_bwd" and args.device == "cpu" and seq > _PROFILED):
        timed.row["xla_temp_mb"] = (cases.peak_bytes(run, args.device) - out) / MIB
    if mode == "fwd_bwd":
        timed.row["residual_mb"] = cases.residual_bytes(inputs, impl, args.chunk_size) / MIB
    return timed


def _runs(args: argparse.Namespace, seq: int, d: int) -> list[Timed]:
    dtype = getattr(torch, args.dtype)
    inputs, grad_o = cases.draw(args.batch, seq, args.heads, d, dtype, args.device)
    rows = []
    jax_calls: dict[str, Callable[[], list[Tensor]]] = {}
    if args.jax:
        from samu_lm.benchmarks import delta_jax

        jax_calls = delta_jax.build(inputs, grad_o, args.chunk_size)
    for mode in MODES:
        for impl in args.impls:
            if not _too_slow(args, impl, mode, seq, d):

                def run(mode: str = mode, impl: str = impl) -> list[Tensor]:
                    return cases.call(inputs, grad_o, mode, impl, args.chunk_size)

                rows.append(_prepare(args, impl, mode, inputs, grad_o, run))
        if mode in jax_calls:
            rows.append(_prepare(args, JAX, mode, inputs, grad_o, jax_calls[mode]))
    return rows


def _time(rows: list[Timed], repeats: int, synchronize: Callable[[], None]) -> None:
    """Samples the rows in turn, each round in the other order, so that what else the machine does hits all alike."""
    rows = [row for row in rows if "error" not in row.row]
    for timed in rows:
        timed.sample(synchronize)
        timed.inner = max(1, round(30 / timed.samples[0]))
        timed.samples, timed.cpu = [], []
    for turn in range(repeats):
        for timed in rows if turn % 2 == 0 else reversed(rows):
            timed.sample(synchronize)
    for timed in rows:
        q1, median, q3 = statistics.quantiles(timed.samples, n=4, method="inclusive")
        timed.row.update(inner=timed.inner, median_ms=median, q1_ms=q1, q3_ms=q3, samples_ms=timed.samples)
        timed.row["cpu_ms"] = statistics.median(timed.cpu)


def _check(args: argparse.Namespace) -> None:
    check_positive(batch=args.batch, heads=args.heads, seq_lens=args.seq_lens, dims=args.dims)
    if args.repeats < 2:
        raise ConfigError("--repeats", args.repeats, "must be at least 2: quartiles need samples")
    if (args.device == "cuda" or args.scale) and not torch.cuda.is_available():
        key, value = ("--scale", "yes") if args.scale else ("--device", args.device)
        raise ConfigError(key, value, "needs a CUDA GPU, and none is visible")
    if args.jax:
        if args.device != "cpu" or args.dtype != "float32":
            raise ConfigError("--jax", f"{args.device}, {args.dtype}", "is measured on the CPU in float32 only")
        if any(seq % args.chunk_size for seq in args.seq_lens):
            raise ConfigError("--jax", args.seq_lens, f"takes lengths that are multiples of {args.chunk_size} only")
        try:
            import jax  # noqa: F401
        except ImportError:
            raise ConfigError("--jax", True, "JAX is not installed; pip install 'samu-lm[bench]'") from None


def _measure_table(args: argparse.Namespace) -> None:
    """All shapes; what is measured so far is written after each."""
    synchronize = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    load = [os.getloadavg()[0]]  # of all that the machine does, before and after each shape
    device = environment() | {"backend": args.device, "cores": os.cpu_count(), "load_average": load}
    if args.jax:
        device["jax"] = importlib.metadata.version("jax")
    config = {
        "device": args.device, "batch": args.batch, "heads": args.heads, "seq_lens": args.seq_lens, "dims": args.dims,
        "dtypes": [args.dtype], "impls": args.impls, "chunk_sizes": [args.chunk_size], "repeats": args.repeats,
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    for d in args.dims:
        for seq in args.seq_lens:
            rows = _runs(args, seq, d)
            _time(rows, args.repeats, synchronize)
            for row in (timed.row for timed in rows):
                results.append(row)
                print(json.dumps({key: value for key, value in row.items() if key != "samples_ms"}), flush=True)
            load.append(os.getloadavg()[0])
            result = {"device": device, "config": config, "results": results}
            write_json(args.output, result)
    write_table(args.output, table(result))


def run(args: argparse.Namespace) -> int:
    """Measures the table, or the run at scale, and writes it as JSON."""
    _check(args)
    check_output(args.output)
    if args.scale:
        from samu_lm.benchmarks.delta_scale import measure

        write_json(args.output, {"environment": environment(), **measure(args.repeats)})
    else:
        _measure_table(args)
    return 0
