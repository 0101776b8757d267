"""The gated delta rule on the CPU: every implementation against the float64 loop, what is kept, what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from samu_lm.ops import gated_delta_rule
from samu_lm.ops.gated_delta import chunked, rows
from samu_lm.ops.gated_delta.inverse import UnitLowerInverse
from tests.ops.gated_delta.oracle import compare, delta_loop, draw
from tests.ops.support import random_reset, relative_error

CPU = ("recurrent", "chunked", "chunked_fat")
by_implementation = pytest.mark.parametrize("implementation", CPU)


@by_implementation
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "dk", "dv", "resets", "with_state"),
    [
        (2, 1, 2, 8, 4, False, True),
        (1, 17, 1, 4, 12, True, True),
        (2, 130, 3, 8, 12, True, False),
        (1, 130, 2, 16, 8, False, True),
    ],
)
def test_against_the_loop(
    implementation: str,
    chunk_size: int,
    batch: int,
    length: int,
    heads: int,
    dk: int,
    dv: int,
    resets: bool,
    with_state: bool,
) -> None:
    if implementation == "recurrent" and chunk_size > 16:
        return  # it has no chunks
    inputs = draw(batch, length, heads, dk, dv)
    reset = random_reset(batch, length, 0.08) if resets else None
    if reset is not None and with_state:
        reset[:, 0] = False
    state = torch.randn(batch, heads, dk, dv).requires_grad_() if with_state else None
    compare(inputs, reset, state, implementation=implementation, chunk_size=chunk_size)


@pytest.mark.parametrize("implementation", ["chunked", "chunked_fat"])
def test_at_the_size_of_the_benchmark(implementation: str) -> None:
    compare(draw(1, 256, 2, 64, 64), implementation=implementation)


@pytest.mark.parametrize("implementation", ["chunked", "chunked_fat"])
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
@pytest.mark.parametrize("length", [96, 129, 200, 256])
def test_in_many_groups(implementation: str, chunk_size: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few chunks at a time as there may be, the last of them filled or not."""
    monkeypatch.setattr(rows, "_ELEMENTS_TOGETHER", 1)
    reset = random_reset(2, length, 0.03)
    reset[:, 0] = False
    state = torch.randn(2, 2, 8, 12).requires_grad_()
    compare(draw(2, length, 2, 8, 12), reset, state, implementation=implementation, chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_every_length(chunk_size: int) -> None:
    """Outputs never depend on what follows, so one loop answers for every length."""
    inputs = {name: x.detach() for name, x in draw(1, 130, 1, 8, 4).items()}
    reset = random_reset(1, 130, 0.05)
    expected, _ = delta_loop(**inputs, reset=reset)
    for length in range(1, 131):
        short = {name: x[:, :length] for name, x in inputs.items()}
        o, _ = gated_delta_rule(**short, reset=reset[:, :length], chunk_size=chunk_size)
        assert relative_error(o, expected[:, :length]) < 1e-6, length


def _kept_bytes(implementation: str, heads: int = 8, d: int = 64) -> list[int]:
    """Bytes of each tensor that a forward pass keeps for its backward pass, the inputs left out."""
    inputs = draw(2, 512, heads, d, d)
    own = {x.untyped_storage().data_ptr() for x in inputs.values()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gated_delta_rule(**inputs, implementation=implementation)
    return list(kept.values())


def test_what_is_kept_for_the_backward_pass() -> None:
    """At T=512, d=64: boundary states, or all that a backward pass reads, below 14 MiB."""
    mib = 2**20
    assert _kept_bytes("chunked") == [2 * mib]
    assert sum(_kept_bytes("chunked_fat")) == 10 * mib
    assert sum(_kept_bytes("chunked", 2, 128)) == 2 * mib
    assert sum(_kept_bytes("chunked_fat", 2, 128)) <= 7 * mib


def test_nothing_is_kept_without_a_gradient() -> None:
    with torch.no_grad():
        inputs = draw(1, 64, 1, 8, 8)
        outputs = chunked._forward(*inputs.values(), None, None, 64, False, True)
    assert [x.numel() for x in outputs[2:]] == [0] * 6


@by_implementation
@pytest.mark.parametrize("log_alpha", [0.0, -50.0, -1e4, -1e30])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_ends_of_the_gates(implementation: str, log_alpha: float, beta: float) -> None:
    """Decays from none to total, with learning rates up to a reflection: the loop's values, all finite."""
    inputs = draw(1, 70, 2, 8, 8)
    with torch.no_grad():
        inputs["log_alpha"].fill_(log_alpha)
        inputs["log_alpha"][:, ::3] = -0.01
        inputs["beta"].fill_(beta)
    reset = random_reset(1, 70)
    o, _ = gated_delta_rule(**inputs, reset=reset, implementation=implementation)
    expected, _ = delta_loop(**inputs, reset=reset)
    cotangent = torch.randn_like(o)
    grads = torch.autograd.grad(o, list(inputs.values()), cotangent)
    truths = torch.autograd.grad(expected, list(inputs.values()), cotangent.double())
    assert relative_error(o, expected) < 1e-6 or not expected.any()
    for name, grad, truth in zip(inputs, grads, truths, strict=True):
        assert grad.isfinite().all(), name
        # Where the loop's own gradient all but vanishes, rounding of the others' size is what is left.
        assert (grad - truth).norm() <= 2e-6 * truth.norm() + 1e-7 * cotangent.norm(), name


@by_implementation
def test_minus_infinity_drops_the_state(implementation: str) -> None:
    """log_alpha = -inf does to one head what a reset does to all, gradients included."""
    inputs = draw(1, 50, 1, 8, 8)
    reset = random_reset(1, 50, 0.2)
    infinite = {name: x.detach().clone() for name, x in inputs.items()}
    infinite["log_alpha"][reset] = -torch.inf
    infinite = {name: x.requires_grad_() for name, x in infinite.items()}
    results = []
    for call, mask in ((inputs, reset), (infinite, None)):
        o, _ = gated_delta_rule(**call, reset=mask, implementation=implementation, chunk_size=16)
        results.append([o, *torch.autograd.grad(o.square().sum(), list(call.values()))])
    for one, other in zip(*results, strict=True):
        assert other.isfinite().all()
        assert torch.equal(one, other)


def test_repeated_keys() -> None:
    """The same key throughout, learning rate 1, no decay: powers of the chunk's matrix would lose every digit."""
    inputs = draw(1, 128, 1, 8, 8)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, :1].expand_as(inputs["k"]))
        inputs["beta"].fill_(1)
        inputs["log_alpha"].zero_()
    o, _ = gated_delta_rule(**inputs, chunk_size=128)
    expected, _ = delta_loop(**inputs)
    assert relative_error(o, expected) < 5e-6
    grad, truth = (torch.autograd.grad(x.sum(), inputs["v"])[0] for x in (o, expected))
    assert relative_error(grad, truth) < 5e-6


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_inverse(size: int) -> None:
    matrices = torch.randn(3, size, size, dtype=torch.float64) * 0.2
    lower = torch.eye(size).double() + matrices.tril(-1)
    invert, out = UnitLowerInverse(matrices), torch.zeros_like(matrices)
    for _ in range(2):  # nothing is left of an earlier call
        invert(matrices, out)
    torch.testing.assert_close(out @ lower, torch.eye(size).double().expand(3, -1, -1))


def test_a_long_row_stays_finite() -> None:
    inputs = draw(1, 65_536, 1, 4, 4)
    with torch.no_grad():
        inputs["log_alpha"].mul_(1e-4)
    o, state = gated_delta_rule(**inputs, output_final_state=True)
    grads = torch.autograd.grad(o.sum(), list(inputs.values()))
    assert state is not None
    assert all(x.isfinite().all() for x in (o, state, *grads))


@by_implementation
def test_half_precision_is_summed_in_float32(implementation: str) -> None:
    inputs = draw(1, 100, 2, 16, 16, torch.bfloat16)
    o, state = gated_delta_rule(**inputs, output_final_state=True, implementation=implementation)
    expected, end = delta_loop(**inputs)
    assert o.dtype == torch.bfloat16
    assert state is not None and state.dtype == torch.float32
    assert relative_error(o, expected) < 2**-8
    assert relative_error(state, end) < 1e-6
    grads = torch.autograd.grad(o.sum(), list(inputs.values()))
    truths = torch.autograd.grad(expected.sum(), list(inputs.values()))
    for grad, truth in zip(grads, truths, strict=True):
        assert grad.dtype == torch.bfloat16
        assert relative_error(grad, truth) < 2**-7


@by_implementation
def test_autocast_does_not_reach_the_sums(implementation: str) -> None:
    inputs = draw(1, 40, 2, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = gated_delta_rule(**inputs, implementation=implementation, chunk_size=16)
    assert o.dtype == torch.float32
    assert relative_error(o, delta_loop(**inputs)[0]) < 1e-6


@by_implementation
def test_float64(implementation: str) -> None:
    compare(draw(1, 40, 2, 4, 8, torch.float64), implementation=implementation, chunk_size=16, tolerance=1e-13)


@by_implementation
def test_only_the_final_state_has_a_gradient(implementation: str) -> None:
    inputs = draw(1, 40, 2, 8, 4)
    _, state = gated_delta_rule(**inputs, output_final_state=True, implementation=implementation, chunk_size=16)
    _, expected = delta_loop(**inputs)
    assert state is not None
    leaves = [x for name, x in inputs.items() if name != "q"]
    grads = torch.autograd.grad(state.sum(), leaves)
    for grad, truth in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert relative_error(grad, truth) < 1e-6


@by_implementation
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_to_do(implementation: str, batch: int, length: int) -> None:
    inputs = draw(batch, length, 2, 8, 4)
    state = torch.randn(batch, 2, 8, 4)
    o, final = gated_delta_rule(**inputs, initial_state=state, output_final_state=True, implementation=implementation)
    assert o.shape == (batch, length, 2, 4)
    assert torch.equal(final, state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 5, 3, 8, dtype=torch.int64)}, TypeError, r"q\.dtype=torch\.int64"),
        ({"q": torch.zeros(2, 5, 24)}, ValueError, r"q\.shape=\(2, 5, 24\)"),
        ({"k": torch.zeros(2, 5, 3, 4)}, ValueError, r"k\.shape=\(2, 5, 3, 4\)"),
        ({"v": torch.zeros(2, 6, 3, 4)}, ValueError, r"v\.shape=\(2, 6, 3, 4\)"),
        ({"log_alpha": torch.zeros(2, 5)}, ValueError, r"log_alpha\.shape=\(2, 5\)"),
        ({"beta": torch.zeros(2, 5, 4)}, ValueError, r"beta\.shape=\(2, 5, 4\)"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"reset\.dtype=torch\.float32"),
        ({"reset": torch.zeros(2, 6, dtype=torch.bool)}, ValueError, r"reset\.shape=\(2, 6\)"),
        ({"initial_state": torch.zeros(2, 3, 4, 8)}, ValueError, r"initial_state\.shape=\(2, 3, 4, 8\)"),
        ({"implementation": "fast"}, ValueError, r"implementation='fast': must be one of recurrent, chunked"),
        ({"chunk_size": 48}, ValueError, r"chunk_size=48: must be one of 16, 32, 64, 128"),
    ],
)
def test_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gated_delta_rule(**{**draw(2, 5, 3, 8, 4), **change})


def test_ssd_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    with pytest.raises(
        RuntimeError, match=r"implementation='ssd' requires an accelerator; use implementation='chunked'"
    ):
        gated_delta_rule(**draw(1, 3, 1, 8, 8), implementation="ssd")


@pytest.mark.parametrize("fat", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_registration(fat: bool, with_mask: bool) -> None:
    """Schema, fake tensors and autograd registration of the op."""
    inputs = draw(2, 20, 2, 8, 4)
    reset = random_reset(2, 20) if with_mask else None
    state = None if with_mask else torch.randn(2, 2, 8, 4).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(chunked._forward, (*inputs.values(), reset, state, 16, True, fat), test_utils=tests)


def test_compiles_without_a_break() -> None:
    inputs = draw(1, 40, 2, 8, 4)

    def call(v: Tensor, reset: Tensor) -> Tensor:
        return gated_delta_rule(**{**inputs, "v": v}, reset=reset)[0] * 1.0

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for probability in (0.05, 0.2):
        reset = random_reset(1, 40, probability)
        o, expected = compiled(inputs["v"], reset), gated_delta_rule(**inputs, reset=reset)[0]
        assert torch.equal(o, expected)
        one, other = (torch.autograd.grad(x.square().sum(), inputs["k"])[0] for x in (o, expected))
        assert torch.equal(one, other)
