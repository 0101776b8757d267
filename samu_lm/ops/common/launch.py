"""How the Triton kernels are started: one call that counts launches and can compile without running.

Every kernel of the package goes through :func:`launch`, so that a benchmark can count launches, and so that the whole
of an op can be compiled for a GPU on a machine without one (:func:`compile_only`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton

_observer: Callable[[Any, int, tuple[Any, ...], dict[str, Any]], None] | None = None
_compiling = False
_local = threading.local()  # the backward pass runs in threads of its own
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    power = 1
    while power < n:  # not bit_length: n may be a symbolic size while torch.compile traces
        power *= 2
    return power


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Starts ``programs`` programs of a Triton kernel along grid axis 0 (the axis that may exceed 65,535).

    Args:
        kernel: a ``triton.jit`` function.
        programs: size of the grid; 0 starts nothing.
        args: its leading arguments; a tensor may come as a ``replay.Slot``.
        options: its compile-time arguments, and Triton's own (``num_warps``).
    """
    if programs == 0:
        return
    tensors = tuple([arg.resolve() if hasattr(arg, "resolve") else arg for arg in args])
    if _observer is not None:
        _observer(kernel, programs, tensors, options)
    if _compiling:
        return
    compiled = kernel[(programs,)](*tensors, **options)
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder(kernel, compiled, programs, args, options)


def watched() -> bool:
    """Whether every launch must go through :func:`launch` one by one: it is observed, interpreted or hooked."""
    if _observer is not None or _INTERPRETED:
        return True
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@contextlib.contextmanager
def recording(recorder: Callable[..., None]) -> Iterator[None]:
    """Calls ``recorder(kernel, compiled, programs, args, options)`` after every launch of this thread in the block."""
    before = getattr(_local, "recorder", None)
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = before


@contextlib.contextmanager
def observe(observer: Callable[[Any, int, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Calls ``observer(kernel, programs, args, options)`` at every launch within the block."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextlib.contextmanager
def count_launches() -> Iterator[list[str]]:
    """A list that receives the name of every kernel started within the block."""
    names: list[str] = []
    with observe(lambda kernel, programs, args, options: names.append(kernel.__name__)):
        yield names


class _FakeDriver:
    """Answers the three questions that compiling asks of a driver, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int = 90) -> Iterator[list[tuple[str, Any]]]:
    """Within the block, launches compile for ``sm_<capability>`` and run nothing; results are left unwritten.

    Yields:
        A list that receives ``(kernel name, compiled kernel)`` per distinct compilation.

    Raises:
        RuntimeError: Triton was imported with its interpreter on, which compiles nothing.
    """
    from triton.runtime.jit import JITFunction

    global _compiling
    compiled: list[tuple[str, Any]] = []
    seen: set[int] = set()

    def compile_one(kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not isinstance(kernel, JITFunction):
            raise RuntimeError(f"TRITON_INTERPRET: {kernel} is interpreted; unset it to compile")
        result = kernel.warmup(*args, grid=(programs,), **options)
        if id(result) not in seen:
            seen.add(id(result))
            compiled.append((kernel.__name__, result))

    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_FakeDriver(capability))
    _compiling = True
    try:
        with observe(compile_one):
            yield compiled
    finally:
        _compiling = False
        driver._active = before
