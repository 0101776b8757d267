"""What ``samu-lm bench delta`` measures: calls of each implementation, their temporaries, residuals and errors.

Shapes: B rows, T tokens, H heads, dk = dv.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
)

from samu_lm.benchmarks.float64 import relative_error
from samu_lm.ops import gated_delta_rule

MIB = 2**20
NAMES = ("q", "k", "v", "log_alpha", "beta")
MODES = ("fwd", "fwd_bwd")


def draw(batch: int, length: int, heads: int, d: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """Inputs as the mixer makes them (queries and keys of norm 1), requiring gradients, and an incoming gradient."""
    gen = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    def uniform() -> Tensor:
        return torch.rand(batch, length, heads, generator=gen, device=device)

    q, k = (torch.nn.functional.normalize(normal(batch, length, heads, d), dim=-1).to(dtype) for _ in range(2))
    inputs = [q, k, normal(batch, length, heads, d).to(dtype), -0.1 * uniform(), uniform()]
    return [x.requires_grad_() for x in inputs], normal(batch, length, heads, d).to(dtype)


def call(inputs: list[Tensor], grad_o: Tensor, mode: str, implementation: str, chunk: int) -> list[Tensor]:
    """o, and for ``fwd_bwd`` the five gradients after it."""
    options: dict[str, Any] = {"implementation": implementation, "chunk_size": chunk}
    if mode == "fwd":
        with torch.no_grad():
            return [gated_delta_rule(*inputs, **options)[0]]
    o, _ = gated_delta_rule(*inputs, **options)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad_o)]


def truth(inputs: list[Tensor], grad_o: Tensor, chunk: int) -> list[Tensor]:
    """o and gradients by ``chunked`` in float64, which the tests hold to a float64 token loop at 1e-13."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    return call(wide, grad_o.double(), "fwd_bwd", "chunked", chunk)


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Norm of each difference over the expected norm."""
    pairs = zip(actual, expected, strict=False)
    return [relative_error(a, e) for a, e in pairs]


def residual_bytes(inputs: list[Tensor], implementation: str, chunk: int) -> int:
    """Bytes that a forward pass keeps for its backward pass, the inputs left out."""
    own = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = gated_delta_rule(*inputs, implementation=implementation, chunk_size=chunk)
    del o
    return sum(kept.values())


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Most bytes that a call has allocated at once, its results included, as the allocator reports them."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    # Not torch.profiler: its object per operation takes more than the memory here for a loop over 2,048 tokens.
    settings = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(settings, {ProfilerActivity.CPU})
    _enable_profiler(settings, {ProfilerActivity.CPU})
    try:
        kept = function()
    finally:
        events = _disable_profiler().events()
    del kept
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()  # type: ignore[attr-defined]
        most = max(most, now)
    return most


@dataclass
class Timed:
    """One row being measured: a call, and its samples."""

    row: dict[str, Any]
    run: Callable[[], Any]
    inner: int = 1
    samples: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def sample(self, synchronize: Callable[[], None]) -> None:
        """One sample: the mean of ``inner`` calls in a row, in milliseconds; also the processor time of all threads."""
        start, used = time.perf_counter(), time.process_time()
        for _ in range(self.inner):
            self.run()
        synchronize()
        self.samples.append((time.perf_counter() - start) * 1e3 / self.inner)
        self.cpu.append((time.process_time() - used) * 1e3 / self.inner)
