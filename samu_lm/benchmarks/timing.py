"""How times and memory are measured: device events around warm calls, medians, ceilings measured in the same run."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


def event_samples(call: Callable[[], Any], repeats: int, warmup: int = 3) -> list[float]:
    """Milliseconds of ``repeats`` warm calls between device events, one pair of events per call."""
    for _ in range(warmup):
        call()
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def median(values: list[float]) -> float:
    """The middle value (mean of the two middle ones of an even number)."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def event_median(call: Callable[[], Any], repeats: int = 20, warmup: int = 3) -> float:
    """Median of :func:`event_samples`."""
    return median(event_samples(call, repeats, warmup))


def samples_and_peak(call: Callable[[], Any], repeats: int, warmup: int) -> tuple[list[float], dict[str, int]]:
    """:func:`event_samples`, and the bytes allocated and reserved at their peak: for calls too long to repeat."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    samples = event_samples(call, repeats, 0)
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return samples, {"peak_allocated_bytes": peak[0], "peak_reserved_bytes": peak[1]}


def queued_samples(call: Callable[[], Any], repeats: int, warmup: int = 2) -> list[float]:
    """As :func:`event_samples`, with the device kept busy until the call has been enqueued.

    What is left is the device's own time, launch gaps included: what a call costs where the host runs ahead, as it does
    in training.
    """
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(8_000_000)  # some 4 ms
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    return samples


def queued_median(call: Callable[[], Any], repeats: int = 15) -> float:
    """Median of :func:`queued_samples`."""
    return median(queued_samples(call, repeats))


def graph_median(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds of a call captured once as a CUDA graph and replayed: device work without the host's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return event_median(graph.replay, repeats)


def host_time(call: Callable[[], Any], repeats: int = 40) -> float:
    """Milliseconds that the host needs to start a call, the device's queue never full."""
    spans = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        spans.append((time.perf_counter() - begin) * 1e3)
    return median(spans)


def kernel_times(call: Callable[[], Any], repeats: int = 8) -> list[tuple[str, float]]:
    """Name and median milliseconds of every kernel that a call starts, in the order of its launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    per_call, rest = divmod(len(events), repeats)
    if rest:  # some call started more kernels than another: only totals by name mean something
        totals: dict[str, float] = defaultdict(float)
        for event in events:
            totals[event.name] += event.device_time / 1000 / repeats
        return list(totals.items())
    spans = [events[position::per_call] for position in range(per_call)]
    return [(span[0].name.split("(")[0], median([e.device_time / 1000 for e in span])) for span in spans]


def peak_memory(call: Callable[[], Any]) -> dict[str, int]:
    """Bytes allocated and reserved at the peak of a warm call, absolute and above what was there before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del kept
    return {
        "peak_allocated_delta_bytes": peak[0] - before[0],
        "peak_reserved_delta_bytes": peak[1] - before[1],
        "peak_allocated_bytes": peak[0],
        "peak_reserved_bytes": peak[1],
        "baseline_allocated_bytes": before[0],
        "baseline_reserved_bytes": before[1],
    }


def copy_rate(gibibytes: int = 2) -> float:
    """Device-to-device copy in TB/s, bytes read plus bytes written, on random data."""
    source = torch.empty(gibibytes * 2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (event_median(lambda: target.copy_(source), 10) * 1e9)


def environment() -> dict[str, str]:
    """Versions that a recorded figure belongs to."""
    import triton

    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
    }
