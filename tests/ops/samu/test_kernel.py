"""SAMU's Triton kernels, in the interpreter on a CPU (on the GPU where there is one), against the float64 loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.ops import causal_conv1d, samu_controls, samu_mixer
from samu_lm.ops.common.launch import count_launches
from samu_lm.ops.samu.kernel_plan import Plan, use_plan
from tests.ops.samu.oracle import controls, samu_loop
from tests.ops.support import SAMU_CASE, compare_with_loop, gradients, random_reset, relative_error, reset_of_lengths

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("nu_log", "theta_log", "phase_direction", "radial_direction", "phase_amplitude", "radial_amplitude")

# Small sizes, so that short rows have many chunks, groups and blocks of modes.
PLANS = {
    "plain": Plan(chunk=16, group=2, block=16, gradient_block=16),
    "sparse states": Plan(chunk=32, save_every=16, group=2, block=32, gradient_block=16),
    "short steps": Plan(chunk=16, step=4, gradient_step=4, save_every=4, group=8, block=16, gradient_block=32),
    "fused": Plan(chunk=16, group=2, block=16, fused=True, rebuild=True, control_block=16),
    "fused, one pass": Plan(chunk=32, save_every=16, group=8, fused=True, fused_controls=True, piece=16, touch=True),
    "fused, tiles": Plan(
        chunk=32, save_skip=2, group=8, fused=True, fused_controls=True, piece=16, tiles=True, control_branch=True
    ),
    "skipped states": Plan(chunk=64, step=4, gradient_step=4, save_every=4, save_skip=4, group=8, fused=True),
    "long words": Plan(chunk=64, group=8, block=32, gradient_block=64, touch=True),
}
by_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def draw(batch: int, length: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs of the mixer, on the test's device."""
    modes = width // 2
    inputs = {
        "x": torch.randn(batch, length, width).to(dtype),
        "nu_log": torch.log(-torch.log(torch.rand(modes).clamp(min=1e-30)) / 2),
        "theta_log": torch.log(2 * torch.pi * torch.rand(modes).clamp(min=1e-30)),
        "phase_direction": torch.randn(width + 1),
        "radial_direction": torch.randn(width + 1),
        "phase_amplitude": torch.tensor(0.7),
        "radial_amplitude": torch.tensor(-1.2),
    }
    return {name: t.to(DEVICE).requires_grad_() for name, t in inputs.items()}


def loop(inputs: dict[str, Tensor], reset: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mixer in float64."""
    x, nu_log, theta_log, *rest = inputs.values()
    eta, delta = controls(x, *rest)
    return samu_loop(x, eta, delta, nu_log, theta_log, reset, state)


def compare(
    batch: int,
    length: int,
    width: int,
    *,
    resets: bool = False,
    with_state: bool = False,
    dtype: torch.dtype = torch.float32,
    bounds: tuple[float, float] = (2e-6, 2e-5),
) -> None:
    """Outputs and every gradient of the mixer, float64 loop against kernels."""
    inputs = draw(batch, length, width, dtype)
    reset = random_reset(batch, length).to(DEVICE) if resets else None
    state = torch.randn(batch, width, device=DEVICE).requires_grad_() if with_state else None
    actual = samu_mixer(**inputs, reset=reset, initial_state=state, output_final_state=True, backend="triton")
    assert actual[1] is not None
    expected = loop(inputs, reset, state)
    leaves = [*inputs.values(), *([] if state is None else [state])]
    cotangents = (torch.randn_like(actual[0]), torch.randn_like(actual[1]))
    grads = gradients(actual, leaves, cotangents)  # type: ignore[arg-type]
    true_grads = gradients(expected, leaves, cotangents)
    for name, value, truth in zip(("y", "final_state"), actual, expected, strict=True):
        assert relative_error(value, truth) < bounds[0], name
    for name, value, truth in zip([*inputs, "initial_state"], grads, true_grads, strict=False):
        if truth.dim() or float(truth.abs()) > 1e-3 * float(true_grads[0].norm()):
            assert relative_error(value, truth) < bounds[1], name
        else:  # a scalar that nearly cancels
            assert float((value - truth).abs()) < bounds[1] * float(true_grads[0].norm()), name


@by_plan
@pytest.mark.parametrize(
    ("batch", "length", "width", "resets", "with_state"),
    [(2, 1, 44, True, True), (1, 7, 2, False, False), (2, 33, 12, True, False), (1, 70, 44, True, True)],
)
def test_against_the_loop(plan: Plan, batch: int, length: int, width: int, resets: bool, with_state: bool) -> None:
    with use_plan(plan):
        compare(batch, length, width, resets=resets, with_state=with_state)


@pytest.mark.parametrize("length", [8, 15, 16, 17, 48])
def test_lengths_about_the_chunk(length: int) -> None:
    with use_plan(PLANS["plain"]):
        compare(1, length, 12, with_state=length % 2 == 0)


@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [
        ("plain", torch.bfloat16, 36),
        ("fused, one pass", torch.bfloat16, 36),
        ("fused, tiles", torch.bfloat16, 132),
        ("fused, tiles", torch.float16, 70),
        ("fused", torch.bfloat16, 38),  # an odd number of modes cannot be read in pairs
        ("plain", torch.float16, 38),
    ],
)
def test_half_precision(name: str, dtype: torch.dtype, width: int) -> None:
    """Exact inputs, float32 inside, roundings only where values leave (the interpreter truncates bfloat16)."""
    eps = torch.finfo(dtype).eps
    with use_plan(PLANS[name]):
        compare(1, 37, width, resets=True, dtype=dtype, bounds=(eps, 2 * eps))


@by_plan
def test_given_controls(plan: Plan) -> None:
    with use_plan(plan):
        compare_with_loop(
            SAMU_CASE, 1, 41, 12, reset=random_reset(1, 41), with_state=True, tolerance=2e-6, backend="triton"
        )


@pytest.mark.parametrize("shape", [(2, 21, 20), (1, 1, 2), (1, 40, 70)])
def test_controls(shape: tuple[int, int, int]) -> None:
    inputs = draw(*shape)
    leaves = [inputs[name] for name in ("x", *NAMES[2:])]
    with use_plan(PLANS["plain"]):
        actual = samu_controls(*leaves, backend="triton")
        expected = controls(*leaves)
        cotangents = tuple(torch.rand_like(value) * value.detach().sign() for value in actual)
        grads, true_grads = (gradients(pair, leaves, cotangents) for pair in (actual, expected))  # type: ignore[arg-type]
    for value, truth in zip((*actual, *grads), (*expected, *true_grads), strict=True):
        assert relative_error(value, truth) < 5e-6


def test_strided_input() -> None:
    """A slice of a wider tensor is read where it lies; a transposed one gives the same."""
    inputs = draw(2, 24, 20)
    wide = torch.randn(2, 24, 64, device=DEVICE)
    for x in (wide[..., 4:24], torch.randn(20, 24, 2, device=DEVICE).permute(2, 1, 0)):
        with use_plan(PLANS["plain"]):
            strided, dense = (
                samu_mixer(**{**inputs, "x": value}, backend="triton")[0] for value in (x, x.contiguous())
            )
        assert not x.is_contiguous()
        assert torch.equal(strided, dense)


@pytest.mark.parametrize("fused", [False, True])
def test_a_change_crosses_no_first_token(fused: bool) -> None:
    """Infinity in one document changes no bit of its neighbours, in outputs and in the gradient of x."""
    inputs = draw(1, 48, 12)
    reset = torch.zeros(1, 48, dtype=torch.bool, device=DEVICE)
    reset[0, [0, 13, 32]] = True
    results = []
    for change in (0.0, float("inf")):
        x = inputs["x"].detach().clone()
        x[:, 13:32] += change
        x.requires_grad_()
        with use_plan(Plan(chunk=16, group=8, block=16, gradient_block=16, fused=fused)):
            y, _ = samu_mixer(**{**inputs, "x": x}, reset=reset, backend="triton")
            results.append((y, torch.autograd.grad(y.sum(), x)[0]))
    outside = [*range(13), *range(32, 48)]
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:, outside], after[:, outside])
        assert torch.isfinite(before).all()


def test_bits_do_not_change_from_run_to_run_and_grads_can_be_taken_twice() -> None:
    inputs = draw(1, 40, 12)
    with use_plan(PLANS["plain"]):
        y, _ = samu_mixer(**inputs, backend="triton")
        twice = [torch.autograd.grad(y.square().sum(), list(inputs.values()), retain_graph=True) for _ in range(2)]
        again, _ = samu_mixer(**inputs, backend="triton")
    assert torch.equal(y, again)
    for one, other in zip(*twice, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept_without_gradients() -> None:
    from samu_lm.ops.samu import kernel

    inputs = {name: t.detach() for name, t in draw(1, 40, 12).items()}
    y, _, saved = kernel._mixer(*inputs.values(), None, None, False, "")
    assert saved.numel() == 0
    assert torch.isfinite(y).all()


def test_launches() -> None:
    """At most twelve kernels for forward and backward of the mixer, whatever the shape."""
    inputs = draw(1, 70, 4)
    for plan, bound in ((PLANS["plain"], 12), (PLANS["fused"], 11)):
        with use_plan(plan), count_launches() as names:
            y, _ = samu_mixer(**inputs, backend="triton")
            y.sum().backward()
        assert len(names) == bound, names


def test_registration() -> None:
    """Fake implementations and autograd formulas agree with the ops, as torch.compile needs."""
    from samu_lm.ops.samu import kernel

    inputs = draw(1, 20, 8)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    with use_plan(PLANS["plain"]):
        torch.library.opcheck(kernel._mixer, (*inputs.values(), None, None, True, ""), test_utils=tests)
        torch.library.opcheck(kernel._controls, tuple(inputs[n] for n in ("x", *NAMES[2:])), test_utils=tests)
        eta = torch.randn(1, 20, device=DEVICE).requires_grad_()
        args = (inputs["x"], eta, eta, inputs["nu_log"], inputs["theta_log"], None, None, True, "")
        torch.library.opcheck(kernel._scan, args, test_utils=tests)


@pytest.mark.parametrize("width", [2, 44])
def test_one_token_step(width: int) -> None:
    """Decoding's single launch is the same function, with and without a state, across a first token too."""
    inputs = {name: t.detach() for name, t in draw(3, 1, width).items()}
    state = torch.randn(3, width, device=DEVICE)
    first = torch.tensor([[False], [True], [False]], device=DEVICE)
    poisoned = torch.where(first, float("nan"), state)
    for reset, initial, clean in ((None, None, None), (None, state, state), (first, poisoned, state)):
        with count_launches() as names:
            y, final = samu_mixer(
                **inputs, reset=reset, initial_state=initial, output_final_state=True, backend="triton"
            )
        assert names == ["step_kernel"]
        assert final is not None
        for value, truth in zip((y, final), loop(inputs, reset, clean), strict=True):
            assert relative_error(value, truth) < 1e-6


def test_compiles_once_without_a_break() -> None:
    """One graph for convolution and mixer, whatever the number of documents; values as in the eager call."""
    inputs = {name: t.detach() for name, t in draw(1, 24, 8).items()}
    weight, bias = torch.randn(8, 4, device=DEVICE), torch.randn(8, device=DEVICE)
    compiled_graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return graph

    def call(x: Tensor, reset: Tensor) -> Tensor:
        x, _ = causal_conv1d(x, weight, bias, reset=reset, backend="triton")
        return samu_mixer(**{**inputs, "x": x}, reset=reset, backend="triton")[0]

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for lengths in ([24], [3, 21], [1, 1, 9, 13]):
        reset = reset_of_lengths(lengths).to(DEVICE)
        assert torch.equal(compiled(inputs["x"], reset), call(inputs["x"], reset))
    assert compiled_graphs == 1
    with use_plan(PLANS["plain"]):
        compiled(inputs["x"], reset)
    assert compiled_graphs == 2, (
        "graphs on the disk hold the sizes of kept buffers, so that a plan must be in their key"
    )


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (Plan(save_skip=1), "save_skip=1"),
        (Plan(save_every=4), "save_every=4"),
        (Plan(save_every=8, gradient_step=16), "gradient_step=16"),
    ],
    ids=["none kept", "passed over", "looked for elsewhere"],
)
def test_plans_that_would_read_states_nobody_kept_are_refused(plan: Plan, field: str) -> None:
    with use_plan(plan), pytest.raises(ValueError, match=field):
        samu_mixer(*draw(1, 17, 4).values(), backend="triton")
