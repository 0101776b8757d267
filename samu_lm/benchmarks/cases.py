"""The mixers, and the convolution before them, as benchmark cases: inputs, calls, float64 check.

One object per op, shape, and resets on or off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samu_lm.benchmarks import rglru_float64
from samu_lm.benchmarks.float64 import NAMES, draw_mixer, mixer64, relative_error
from samu_lm.errors import SamuLMError
from samu_lm.ops import causal_conv1d, rglru_mixer, samu_mixer
from samu_lm.ops.common.launch import count_launches

Shape = tuple[int, int, int]
PHASES = ("forward", "backward", "forward_backward")
DEVICE = "cuda"
# Mean tokens per document where internal resets are on.
DOCUMENT = 1024


class CheckFailed(SamuLMError):
    """A kernel does not agree with float64: it must not be timed."""


@dataclass
class Case:
    """An op on a shape, ready to run.

    Attributes:
        architecture: a key of :data:`CASES`.
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

    def samples(self, clock: Callable[[Callable[[], Any], int], list[float]], repeats: int) -> dict[str, list[float]]:
        """Milliseconds of each phase by a clock of ``timing``."""
        phases = (self.forward, self.backward(), self.forward_backward)
        return {f"{name}_ms": clock(call, repeats) for name, call in zip(PHASES, phases, strict=True)}

    def launches(self) -> list[str]:
        """Names of the kernels of forward and backward, in order."""
        with count_launches() as names:
            self.forward_backward()
        return names


def samu_case(shape: Shape, resets: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    """SAMU, inputs as at initialisation but with amplitudes of 0.5."""
    inputs, first, grad_y = draw_mixer(shape, dtype, DEVICE, document=DOCUMENT if resets else 0)
    leaves = list(inputs.values())
    reset = first if resets else None
    return Case("samu", shape, resets, leaves, lambda: samu_mixer(*leaves, reset=reset, backend="triton")[0], grad_y)


def rglru_case(shape: Shape, resets: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    """RG-LRU with 16 gate blocks, inputs as at initialisation."""
    drawn = rglru_float64.draw(shape, dtype, DEVICE)
    leaves = [drawn[name] for name in rglru_float64.NAMES]
    reset = drawn["first"] if resets else None
    return Case(
        "rglru", shape, resets, leaves, lambda: rglru_mixer(*leaves, reset=reset, backend="triton")[0], drawn["grad_y"]
    )


def conv_case(shape: Shape, resets: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The causal convolution of width 4 that stands before every mixer."""
    inputs, first, grad_y = draw_mixer(shape, dtype, DEVICE, document=DOCUMENT if resets else 0)
    weight = torch.randn(shape[2], 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    leaves = [inputs["x"], weight, weight[:, 0].clone()]
    reset = first if resets else None
    return Case(
        "causal_conv1d", shape, resets, leaves, lambda: causal_conv1d(*leaves, reset=reset, backend="triton")[0], grad_y
    )


CASES: dict[str, Callable[..., Case]] = {"samu": samu_case, "rglru": rglru_case, "causal_conv1d": conv_case}
MIXERS = ("rglru", "samu")


def samu_expected(case: Case, y: Tensor) -> dict[str, Tensor]:
    """y and every gradient of a SAMU case in float64."""
    _, first, _ = draw_mixer(case.shape, case.inputs[0].dtype, DEVICE, document=DOCUMENT)
    # A state within rounding of 0 may fall on either side of the rectifier: gradients are compared on the same side.
    return mixer64(dict(zip(NAMES, case.inputs, strict=True)), first, case.grad_y, through=y > 0)


def rglru_expected(case: Case, y: Tensor) -> dict[str, Tensor]:
    """y and every gradient of an RG-LRU case in float64."""
    drawn = rglru_float64.draw(case.shape, case.inputs[0].dtype, DEVICE)
    with torch.no_grad():
        return rglru_float64.reference64(drawn)


def conv_expected(case: Case, y: Tensor) -> dict[str, Tensor]:
    """y and every gradient of the convolution in float64, one shift per tap."""
    _, first, _ = draw_mixer(case.shape, case.inputs[0].dtype, DEVICE, document=DOCUMENT)
    x, weight, bias = leaves = [t.detach().double().requires_grad_() for t in case.inputs]
    length, taps = x.shape[1], weight.shape[1]
    out = x * weight[:, taps - 1] + bias
    visible = torch.ones_like(first)
    for back in range(1, taps):
        visible = visible & ~torch.nn.functional.pad(first, (back - 1, 0))[:, :length]
        shifted = torch.nn.functional.pad(x, (0, 0, back, 0))[:, :length]
        out = out + torch.where(visible[..., None], shifted, 0) * weight[:, taps - 1 - back]
    grads = torch.autograd.grad(out, leaves, case.grad_y.double())
    return dict(zip(("y", "x", "weight", "bias"), (out.detach(), *grads), strict=True))


EXPECTED: dict[str, Callable[[Case, Tensor], dict[str, Tensor]]] = {
    "samu": samu_expected,
    "rglru": rglru_expected,
    "causal_conv1d": conv_expected,
}


def errors_of(architecture: str, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of y and every gradient against float64; infinity where two runs differ in a bit."""
    case = CASES[architecture](shape, True, dtype)
    poison = [torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(4)]
    del poison
    results, again = case.forward_backward(), case.forward_backward()
    expected = EXPECTED[architecture](case, results[0])
    errors = {}
    for (name, truth), value, second in zip(expected.items(), results, again, strict=True):
        errors[name] = relative_error(value, truth) if torch.equal(value, second) else float("inf")
    return errors


def bound_of(name: str, dtype: torch.dtype) -> float:
    """Largest relative error of y or a gradient: two roundings of a 16-bit type, or float32's at a few thousand tokens.

    A scalar's gradient is one sum over every token, and may nearly cancel.
    """
    if dtype != torch.float32:
        return torch.finfo(dtype).eps / 2
    return 2e-6 if name == "y" else 2e-4 if name.endswith("amplitude") else 2e-5


def hold(architecture: str, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of y and every gradient at a shape.

    Raises:
        CheckFailed: an error is out of bounds, not a number, or two runs differ.
    """
    errors = errors_of(architecture, shape, dtype)
    for name, error in errors.items():
        bound = bound_of(name, dtype)
        if not error < bound:
            raise CheckFailed(f"{architecture} {shape} {dtype}: {name} is off by {error:.1e} (bound {bound:.0e})")
    return errors


def check(architecture: str, shape: Shape, whole: bool = True) -> dict[str, dict[str, float]]:
    """Holds an op to float64: float32 at up to 4,096 tokens of the shape, bfloat16 at the whole shape.

    Args:
        architecture: a key of :data:`CASES`.
        shape: (B, L, W).
        whole: False shortens the bfloat16 rows, too.

    Returns:
        Relative errors by dtype and by name of output or gradient.

    Raises:
        CheckFailed: as :func:`hold`.
    """
    short = (min(shape[0], 2), min(shape[1], 4096), shape[2])
    found = {
        "float32": hold(architecture, short, torch.float32),
        "bfloat16": hold(architecture, shape if whole else short, torch.bfloat16),
    }
    torch.cuda.empty_cache()
    return found
