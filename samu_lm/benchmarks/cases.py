"""The mixers as benchmark cases: inputs, calls, float64 check; one object per mixer, resets on or off, and shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samu_lm.benchmarks import timing
from samu_lm.benchmarks.float64 import NAMES, draw_mixer, mixer64
from samu_lm.ops import rglru_mixer, samu_mixer
from samu_lm.ops.common.launch import count_launches

Shape = tuple[int, int, int]
PHASES = ("forward", "backward", "forward_backward")
# Mean tokens per document where internal resets are on.
DOCUMENT = 1024


class CheckFailed(RuntimeError):
    """A kernel does not agree with float64: it must not be timed."""


@dataclass
class Case:
    """A mixer on a shape, ready to run.

    Attributes:
        architecture: ``samu`` or ``rglru``.
        shape: (B, L, W).
        resets: documents within rows, or one per row.
        inputs: the leaves, x first.
        call: inputs to y.
        grad_y: the incoming gradient, which exists before the clock starts.
    """

    architecture: str
    shape: Shape
    resets: bool
    inputs: list[Tensor]
    call: Callable[[], Tensor]
    grad_y: Tensor
    parameters: int = field(init=False)

    def __post_init__(self) -> None:
        for t in self.inputs:
            t.requires_grad_()
        self.parameters = sum(t.numel() for t in self.inputs[1:])

    def forward(self) -> Tensor:
        """y."""
        return self.call()

    def forward_backward(self) -> tuple[Tensor, ...]:
        """y and every gradient."""
        y = self.call()
        return (y, *torch.autograd.grad(y, self.inputs, self.grad_y))

    def backward(self) -> Callable[[], Any]:
        """A call of the backward pass alone, on a graph that is kept."""
        y = self.call()
        return lambda: torch.autograd.grad(y, self.inputs, self.grad_y, retain_graph=True)

    def samples(self, repeats: int) -> dict[str, list[float]]:
        """Milliseconds between device events of each phase."""
        backward = self.backward()
        return {
            "forward_ms": timing.event_samples(self.forward, repeats),
            "backward_ms": timing.event_samples(backward, repeats),
            "forward_backward_ms": timing.event_samples(self.forward_backward, repeats),
        }

    def launches(self) -> list[str]:
        """Names of the kernels of forward and backward, in order."""
        with count_launches() as names:
            self.forward_backward()
        return names


def samu_case(shape: Shape, resets: bool, dtype: torch.dtype = torch.bfloat16, document: int = DOCUMENT) -> Case:
    """SAMU, inputs as at initialisation but with amplitudes of 0.5."""
    inputs, first, grad_y = draw_mixer(shape, dtype, "cuda", document=document if resets else 0)
    leaves = list(inputs.values())
    reset = first if resets else None
    return Case("samu", shape, resets, leaves, lambda: samu_mixer(*leaves, reset=reset, backend="triton")[0], grad_y)


def rglru_case(shape: Shape, resets: bool) -> Case:
    """RG-LRU with 16 gate blocks, inputs as at initialisation."""
    from samu_lm.benchmarks.rglru_probe import NAMES as RGLRU_NAMES
    from samu_lm.benchmarks.rglru_probe import draw

    drawn = draw(shape, torch.bfloat16, "cuda")
    leaves = [drawn[name] for name in RGLRU_NAMES]
    reset = drawn["first"] if resets else None
    return Case(
        "rglru", shape, resets, leaves, lambda: rglru_mixer(*leaves, reset=reset, backend="triton")[0], drawn["grad_y"]
    )


CASES: dict[str, Callable[[Shape, bool], Case]] = {"samu": samu_case, "rglru": rglru_case}


def samu_errors(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of y and every gradient against float64; infinity where two runs differ in a bit."""
    case = samu_case(shape, True, dtype, document=300)
    _, first, _ = draw_mixer(shape, dtype, "cuda", document=300)
    poison = [torch.full(shape, float("nan"), device="cuda") for _ in range(4)]
    del poison
    results, again = case.forward_backward(), case.forward_backward()
    # A state within rounding of 0 may fall on either side of the rectifier: gradients are compared on the same side.
    inputs = dict(zip(NAMES, case.inputs, strict=True))
    expected = mixer64(inputs, first, case.grad_y, through=results[0] > 0)
    errors = {}
    for name, value, second in zip(("y", *NAMES), results, again, strict=True):
        error = float((value.detach().double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-30))
        errors[name] = error if torch.equal(value, second) else float("inf")
    return errors


def check(architecture: str, shape: Shape) -> dict[str, dict[str, float]]:
    """Holds a mixer to float64 at a few thousand tokens of the shape's width, float32 and bfloat16.

    Raises:
        CheckFailed: an error is out of bounds, not a number, or two runs differ.
    """
    small = (2, min(shape[1], 1500), shape[2])
    if architecture == "samu":
        errors = {str(d).removeprefix("torch."): samu_errors(small, d) for d in (torch.float32, torch.bfloat16)}
    else:
        from samu_lm.benchmarks.rglru_probe import check as rglru_errors

        errors = {str(d).removeprefix("torch."): rglru_errors(small, d) for d in (torch.float32, torch.bfloat16)}
    for dtype, found in errors.items():
        for name, error in found.items():
            # A scalar's gradient is one sum over every token, and may nearly cancel.
            bound = 2e-2 if dtype == "bfloat16" else 2e-4 if name.endswith("amplitude") else 2e-5
            if not error < bound:
                raise CheckFailed(f"{architecture} {small} {dtype}: {name} is off by {error:.1e} (bound {bound:.0e})")
    return errors
