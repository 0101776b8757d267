"""SAMU and the convolution on a GPU: what the interpreter cannot show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.benchmarks.float64 import NAMES, draw_mixer, mixer64
from samu_lm.ops import causal_conv1d, samu_mixer
from samu_lm.ops.samu import kernel_backward
from samu_lm.ops.samu.kernel_plan import Plan, use_plan
from tests.ops.samu.test_kernel import compare, draw, loop
from tests.ops.support import relative_error

WIDTH = 64


def both(inputs: dict[str, Tensor], first: Tensor | None, grad_y: Tensor) -> list[Tensor]:
    """y and every gradient."""
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    y, _ = samu_mixer(*leaves, reset=first, backend="triton")
    return [y, *torch.autograd.grad(y, leaves, grad_y)]


@pytest.mark.parametrize("resets", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
def test_every_short_length(resets: bool, with_state: bool) -> None:
    for length in [*range(1, 18), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 130]:
        compare(2, length, WIDTH, resets=resets, with_state=with_state)


@pytest.mark.parametrize(("length", "width"), [(1000, WIDTH), (4097, WIDTH), (4096, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows(length: int, width: int, dtype: torch.dtype) -> None:
    """Within 2e-6 (y) and 2e-5 (gradients) of float64, in float32; one rounding in bfloat16."""
    inputs, first, grad_y = draw_mixer((2, length, width), dtype, "cuda", document=200)
    results = both(inputs, first, grad_y)
    expected = mixer64(inputs, first, grad_y, through=results[0] > 0)
    for name, value in zip(("y", *NAMES), results, strict=True):
        exact = dtype == torch.float32 or name not in ("y", "x")
        bound = 2e-6 if exact and name == "y" else 2e-5 if exact else torch.finfo(dtype).eps
        if name.endswith("amplitude"):  # one sum over every token, which may nearly cancel
            bound *= 10
        assert relative_error(value, expected[name]) < bound, name


@pytest.mark.usefixtures("large_memory")
def test_more_than_two_to_the_31_elements() -> None:
    """The last document of a row of 2.2e9 elements has the bits that it has alone."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    length, tail, width = 2**21 + 8192, 8192, 1024
    inputs, first, _ = draw_mixer((1, tail, width), torch.bfloat16, "cuda", document=500)
    x = torch.zeros(1, length, width, dtype=torch.bfloat16, device="cuda")
    x[:, -tail:] = inputs["x"]
    reset = torch.zeros(1, length, dtype=torch.bool, device="cuda")
    reset[:, -tail:] = first
    grad_y = torch.zeros_like(x)
    grad_y[:, -tail:] = torch.randn(1, tail, width, device="cuda").bfloat16()
    alone = both(inputs, first, grad_y[:, -tail:].contiguous())
    whole = both({**inputs, "x": x}, reset, grad_y)
    for name, one, other in zip(("y", "x"), alone, whole, strict=False):
        assert relative_error(other[:, -tail:], one) < 1e-2, name
    assert not whole[1][:, :-tail].any()
    assert relative_error(whole[3], alone[3]) < 1e-4


@pytest.mark.usefixtures("large_memory")
def test_more_than_65535_chunks() -> None:
    """Chunks of 16 tokens, 65,700 of them: the last document has the bits that it has alone, as its chunks do."""
    length, tail = 16 * 65_700, 4096
    inputs, first, _ = draw_mixer((1, tail, WIDTH), torch.float32, "cuda", document=300)
    x = torch.randn(1, length, WIDTH, device="cuda")
    x[:, -tail:] = inputs["x"]
    reset = torch.rand(1, length, device="cuda") < 1e-3
    reset[:, -tail:] = first
    grad_y = torch.randn_like(x)
    with use_plan(Plan(chunk=16, group=128)):
        alone = both(inputs, first, grad_y[:, -tail:].contiguous())
        whole = both({**inputs, "x": x}, reset, grad_y)
    for name, one, other in zip(("y", "x"), alone, whole, strict=False):
        assert relative_error(other[:, -tail:], one) < 1e-5, name


@pytest.mark.parametrize("document", [0, 1000], ids=["one document", "packed"])
def test_float32_at_131072_tokens(document: int) -> None:
    """Within 1e-4 of float64 still, outputs and gradients."""
    inputs, first, grad_y = draw_mixer((1, 131_072, 256), torch.float32, "cuda", document=document)
    results = both(inputs, first if document else None, grad_y)
    expected = mixer64(inputs, first, grad_y, through=results[0] > 0)
    for name, value in zip(("y", *NAMES), results, strict=True):
        assert relative_error(value, expected[name]) < 1e-4, name


def test_compiled_without_a_break_and_without_recompiling_for_other_documents() -> None:
    inputs, _, grad_y = draw_mixer((2, 300, WIDTH), torch.bfloat16, "cuda", document=40)
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    weight, bias = torch.randn(WIDTH, 4, device="cuda"), torch.randn(WIDTH, device="cuda")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def forward(x: Tensor, *rest: Tensor) -> Tensor:
        *parameters, reset = rest
        x, _ = causal_conv1d(x, weight, bias, reset=reset, backend="triton")
        return samu_mixer(x, *parameters, reset=reset, backend="triton")[0]

    compiled = torch.compile(forward, fullgraph=True)
    for probability in (0.01, 0.1, 0.5):
        reset = torch.rand(2, 300, device="cuda") < probability
        results = []
        for call in (compiled, forward):
            y = call(*leaves, reset)
            results.append([y, *torch.autograd.grad(y, leaves, grad_y)])
        for one, other in zip(*results, strict=True):
            assert relative_error(one, other) < 1e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_captured_in_a_graph() -> None:
    """A captured call replays on new values of its inputs."""
    inputs, first, grad_y = draw_mixer((1, 500, WIDTH), torch.bfloat16, "cuda", document=40)
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    weight = torch.randn(WIDTH, 4, device="cuda").requires_grad_()
    bias = torch.randn(WIDTH, device="cuda").requires_grad_()
    everything = [*leaves, weight, bias]

    def call() -> list[Tensor]:
        x, _ = causal_conv1d(leaves[0], weight, bias, reset=first, backend="triton")
        y, _ = samu_mixer(x, *leaves[1:], reset=first, backend="triton")
        return [y, *torch.autograd.grad(y, everything, grad_y)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    first.copy_(torch.rand(1, 500, device="cuda") < 0.1)
    graph.replay()
    for one, other in zip(captured, call(), strict=True):
        assert torch.equal(one, other)


def test_changing_lengths_stop_compiling() -> None:
    """Packed steps of changing lengths: after the first few, no kernel is compiled again."""
    counts = []
    for step in range(40):
        length = 200 + 16 * ((37 * step) % 19) + step % 3
        inputs, first, grad_y = draw_mixer((1, length, WIDTH), torch.bfloat16, "cuda", document=40)
        both(inputs, first, grad_y)
        caches = kernel_backward.gradients_kernel.device_caches
        counts.append(sum(len(cache[0]) for cache in caches.values()))
    assert counts[-1] == counts[19]


def test_token_by_token_is_the_whole() -> None:
    inputs = {name: t.detach() for name, t in draw(2, 40, WIDTH).items()}
    reset = torch.zeros(2, 40, dtype=torch.bool, device="cuda")
    reset[:, 17] = True
    state, steps = None, []
    for t in range(40):
        y, state = samu_mixer(
            **{**inputs, "x": inputs["x"][:, t : t + 1]},
            reset=reset[:, t : t + 1] if t else None,
            initial_state=state,
            output_final_state=True,
            backend="triton",
        )
        steps.append(y)
    whole, final = loop(inputs, reset, None)
    assert state is not None
    assert relative_error(torch.cat(steps, 1), whole) < 2e-6
    assert relative_error(state, final) < 2e-6


def test_extremes_stay_finite() -> None:
    inputs, first, grad_y = draw_mixer((1, 65536, WIDTH), torch.float32, "cuda", document=0)
    modes = WIDTH // 2
    inputs["nu_log"] = torch.tensor([20.0, -20.0, 100.0, -100.0], device="cuda").repeat(modes // 4)
    for scale in (20.0, 100.0):
        inputs["x"] = torch.full_like(inputs["x"], scale)
        for value in both({k: v.detach() for k, v in inputs.items()}, first, grad_y):
            assert torch.isfinite(value).all()
