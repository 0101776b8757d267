"""What the ops' tests share: one description per op, so that a property is written once and holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samu_lm.ops import causal_conv1d, rglru, samu
from tests.ops.causal_conv1d.oracle import conv_loop
from tests.ops.rglru.oracle import rglru_loop
from tests.ops.samu.oracle import samu_loop

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OpCase:
    """One op: how to draw its inputs, call it and call its float64 loop.

    Attributes:
        name: the op's name.
        per_token: names of the inputs with a time dimension (dimension 1).
        parameters: names of the inputs without one.
        draw: ``(batch, length, width)`` to a dict of float32 inputs.
        op: the public function.
        loop: its oracle.
        state_shape: ``(batch, width)`` to the state's shape.
    """

    name: str
    per_token: tuple[str, ...]
    parameters: tuple[str, ...]
    draw: Callable[[int, int, int], dict[str, Tensor]]
    op: Callable[..., tuple[Tensor, Tensor | None]]
    loop: Callable[..., Result]
    state_shape: Callable[[int, int], tuple[int, ...]]

    def run(
        self, inputs: dict[str, Tensor], reset: Tensor | None = None, state: Tensor | None = None, **kwargs: str
    ) -> Result:
        """The op with its final state."""
        y, final_state = self.op(**inputs, reset=reset, initial_state=state, output_final_state=True, **kwargs)
        assert final_state is not None
        return y, final_state

    def run_loop(self, inputs: dict[str, Tensor], reset: Tensor | None = None, state: Tensor | None = None) -> Result:
        """The oracle."""
        return self.loop(**inputs, reset=reset, initial_state=state)

    def draw_state(self, batch: int, width: int) -> Tensor:
        """A random initial state."""
        return torch.randn(self.state_shape(batch, width))


def _draw_samu(batch: int, length: int, width: int) -> dict[str, Tensor]:
    modes = width // 2
    return {
        "x": torch.randn(batch, length, width),
        "eta": torch.randn(batch, length) * 0.3,
        "delta": torch.randn(batch, length),
        "nu_log": torch.log(-torch.log(torch.rand(modes).clamp(min=1e-30)) / 2),
        "theta_log": torch.log(2 * torch.pi * torch.rand(modes).clamp(min=1e-30)),
    }


def _draw_rglru(batch: int, length: int, width: int) -> dict[str, Tensor]:
    squared = 0.81 + 0.188 * torch.rand(width)
    return {
        "x": torch.randn(batch, length, width),
        "input_gate_logits": torch.randn(batch, length, width),
        "a_gate_logits": torch.randn(batch, length, width),
        "a_param": torch.log(torch.expm1(-torch.log(squared) / 2)),
    }


def _draw_conv(batch: int, length: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, length, width), "weight": torch.randn(width, 4), "bias": torch.randn(width)}


SAMU_CASE = OpCase(
    "samu", ("x", "eta", "delta"), ("nu_log", "theta_log"), _draw_samu, samu, samu_loop, lambda b, w: (b, w)
)
RGLRU_CASE = OpCase(
    "rglru",
    ("x", "input_gate_logits", "a_gate_logits"),
    ("a_param",),
    _draw_rglru,
    rglru,
    rglru_loop,
    lambda b, w: (b, w),
)
CONV_CASE = OpCase(
    "causal_conv1d",
    ("x",),
    ("weight", "bias"),
    _draw_conv,
    causal_conv1d,
    conv_loop,
    lambda b, w: (b, 3, w),
)
CASES = (SAMU_CASE, RGLRU_CASE, CONV_CASE)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected value; NaN never passes a bound."""
    expected = expected.detach().double()
    difference = (actual.detach().double() - expected).norm()
    return float(difference / expected.norm().clamp(min=1e-30))


def gradients(outputs: Result, inputs: list[Tensor], cotangents: Result) -> list[Tensor]:
    """Gradients of the outputs' product with the cotangents, zero where an input is unused."""
    loss = sum((out * cot.to(out.dtype)).sum() for out, cot in zip(outputs, cotangents, strict=True))
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(grads, inputs, strict=True)]


def compare_with_loop(
    case: OpCase,
    batch: int,
    length: int,
    width: int,
    *,
    reset: Tensor | None = None,
    with_state: bool = False,
    tolerance: float = 2e-5,
    backend: str = "reference",
) -> None:
    """Outputs, final state and every gradient of an op against its float64 loop, each within ``tolerance``."""
    inputs = {name: t.requires_grad_() for name, t in case.draw(batch, length, width).items()}
    state = case.draw_state(batch, width).requires_grad_() if with_state else None
    actual, expected = case.run(inputs, reset, state, backend=backend), case.run_loop(inputs, reset, state)
    leaves = list(inputs.values()) + ([] if state is None else [state])
    names = ["y", "final_state", *inputs, "initial_state"]
    cotangents = (torch.randn_like(actual[0]), torch.randn_like(actual[1]))
    pairs = [
        *zip(actual, expected, strict=True),
        *zip(gradients(actual, leaves, cotangents), gradients(expected, leaves, cotangents), strict=True),
    ]
    for name, (value, truth) in zip(names, pairs, strict=False):
        error = relative_error(value, truth)
        shape = (batch, length, width)
        assert error <= tolerance, f"{case.name} {backend} {shape}: {name} is off by {error:.2e} (bound {tolerance})"


def random_reset(batch: int, length: int, probability: float = 0.1) -> Tensor:
    """A random mask whose first tokens are marked."""
    reset = torch.rand(batch, length) < probability
    reset[:, 0] = True
    return reset


def reset_of_lengths(lengths: list[int]) -> Tensor:
    """The mask ``[1, sum(lengths)]`` of documents laid end to end."""
    reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
    offset = 0
    for length in lengths:
        reset[0, offset] = True
        offset += length
    return reset
