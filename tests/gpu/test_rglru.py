"""RG-LRU's kernels on a GPU, at the sizes and types that the interpreter cannot reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samu_lm.benchmarks.rglru_float64 import NAMES, draw, reference64
from samu_lm.benchmarks.rglru_probe import run_both, run_forward
from samu_lm.ops import rglru, rglru_mixer
from tests.ops.rglru.oracle import rglru_loop
from tests.ops.support import RGLRU_CASE, compare_with_loop, random_reset, relative_error

# Outputs round once; gradients pass through one rounding more.
BOUNDS = {torch.float32: (2e-6, 2e-5), torch.bfloat16: (3e-3, 5e-3), torch.float16: (4e-4, 6e-4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((2, 1, 64), 16), ((1, 4096, 1024), 16), ((3, 777, 1536), 16), ((4, 2048, 2048), 16), ((2, 1000, 2560), 16)],
    ids=str,
)
def test_mixer_against_float64(shape: tuple[int, int, int], blocks: int, dtype: torch.dtype) -> None:
    """y and every gradient, every element written, the same bits twice."""
    inputs = draw(shape, dtype, "cuda", blocks)
    expected = reference64(inputs)
    for name in NAMES:
        inputs[name].requires_grad_()
    spoil = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(6)]
    del spoil
    first, second = run_both(inputs), run_both(inputs)
    for name, value, again in zip(("y", *NAMES), first, second, strict=True):
        assert torch.equal(value, again), name
        assert relative_error(value, expected[name]) < BOUNDS[dtype][name != "y"], name


@pytest.mark.parametrize("start", [1, 34, 67, 100])
def test_every_length(start: int) -> None:
    """Lengths 1 to 132, and two longer ones, against the float64 loop."""
    for length in [*range(start, start + 33), *([1000, 4097] if start == 1 else [])]:
        with torch.device("cuda"):
            reset = random_reset(2, length, 0.05)
            compare_with_loop(
                RGLRU_CASE, 2, length, 40, reset=reset, with_state=length % 2 == 0, tolerance=2e-5, backend="triton"
            )


@pytest.mark.parametrize("logit", [20.0, 100.0, -20.0, -100.0])
@pytest.mark.parametrize("a_param", [-7.0, 0.0, 30.0])
def test_driven_gates_stay_finite(logit: float, a_param: float) -> None:
    """Gates at their ends for 65,536 tokens, |a| from 0 to 1: finite outputs and gradients."""
    x = torch.randn(1, 65536, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gate = torch.full_like(x, logit).requires_grad_()
    param = torch.full((64,), a_param, device="cuda").requires_grad_()
    y, state = rglru(x, gate, gate, param, output_final_state=True, backend="triton")
    grads = torch.autograd.grad(y, [x, gate, param], torch.randn_like(y))
    for value in (y, state, *grads):
        assert value is not None
        assert value.isfinite().all()


def test_radius_next_to_one_keeps_the_state() -> None:
    """|a| within 1e-4 of 1 over 4,096 bfloat16 tokens."""
    x = torch.zeros(1, 4096, 64, dtype=torch.bfloat16, device="cuda")
    x[:, 0] = 1
    logits = torch.full_like(x, -5.0)
    param = torch.full((64,), -6.3, device="cuda")
    _, state = rglru(x, torch.zeros_like(logits), logits, param, output_final_state=True, backend="triton")
    assert state is not None
    assert relative_error(state, rglru_loop(x, torch.zeros_like(logits), logits, param)[1]) < 2e-3


def test_graph_capture() -> None:
    """Forward and backward replay in a CUDA graph, bit for bit."""
    inputs = draw((2, 1000, 1024), torch.bfloat16, "cuda")
    for name in NAMES:
        inputs[name].requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = [value.detach().clone() for value in run_both(inputs)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run_both(inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


def test_documents_do_not_recompile() -> None:
    """Compiled without a break, once; documents change, the graph does not; values are the eager call's."""
    inputs = draw((2, 512, 1024), torch.bfloat16, "cuda")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def call(x: Tensor, reset: Tensor) -> Tensor:
        y, _ = rglru_mixer(x, *(inputs[n] for n in NAMES[1:]), reset=reset, backend="triton")
        return y * 2

    compiled = torch.compile(call, fullgraph=True)
    for probability in (0.0, 0.01, 0.3):
        reset = torch.rand(2, 512, device="cuda") < probability
        assert torch.equal(compiled(inputs["x"], reset), call(inputs["x"], reset))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("length", [2**20 - 33, 2**20 + 33])
def test_past_2_to_the_31_elements(length: int) -> None:
    """B * L * W just below and above 2^31: the last row's end equals the same tokens run alone."""
    shape = (1, length, 2048)
    inputs = draw(shape, torch.bfloat16, "cuda")
    tail = 500
    inputs["first"][:, length - tail] = True
    short = {n: t[:, -tail:].contiguous() if t.dim() == 3 and n in ("x", "grad_y") else t for n, t in inputs.items()}
    short["first"] = inputs["first"][:, -tail:].contiguous()
    for case in (inputs, short):
        for name in NAMES:
            case[name] = case[name].detach().requires_grad_()
    with torch.no_grad():
        whole, alone = run_forward(inputs)[:, -tail:], run_forward(short)
        assert relative_error(whole, alone) < 3e-3
    del whole
    grad, grad_alone = (
        torch.autograd.grad(run_forward(case), case["x"], case["grad_y"])[0][:, -tail:] for case in (inputs, short)
    )
    assert relative_error(grad, grad_alone) < 5e-3


@pytest.mark.usefixtures("large_memory")
def test_more_than_65535_pieces() -> None:
    """Rows times tiles beyond what a grid's second axis could hold."""
    inputs = draw((70_000, 3, 64), torch.bfloat16, "cuda", blocks=1)
    inputs["first"] = torch.rand(70_000, 3, device="cuda") < 0.4
    inputs["first"][:, 0] = True
    assert relative_error(run_forward(inputs), reference64(inputs)["y"]) < 3e-3
