"""RG-LRU's Triton kernels, in the interpreter on a CPU (on the GPU where there is one), against the float64 loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from samu_lm.ops import rglru, rglru_mixer
from samu_lm.ops.common.launch import count_launches
from samu_lm.ops.rglru import kernel, kernel_plan
from tests.ops.rglru.oracle import rglru_loop, rglru_mixer_loop
from tests.ops.support import RGLRU_CASE, compare_with_loop, gradients, random_reset, relative_error, reset_of_lengths

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = ("input_gate_weight", "input_gate_bias", "a_gate_weight", "a_gate_bias", "a_param")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 16 tokens in pieces of one, so that short rows have many; full-precision products at every width."""
    monkeypatch.setitem(kernel_plan.TILE_TOKENS, "mixer", 16)
    monkeypatch.setitem(kernel_plan.TILE_TOKENS, "logits", 16)
    monkeypatch.setitem(kernel_plan.PIECE_TILES, "all", 1)
    monkeypatch.setattr(kernel_plan, "multiprocessors", lambda _: 1)
    if DEVICE == "cpu":
        monkeypatch.setitem(kernel_plan.WIDEST_BLOCK, torch.float32, 256)
    kernel_plan.clear_plans()
    yield
    kernel_plan.clear_plans()


def draw(batch: int, length: int, blocks: int, w: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs of the mixer, on the test's device; half-precision weights are exact."""
    width = blocks * w
    squared = 0.81 + 0.188 * torch.rand(width)
    inputs = {
        "x": torch.randn(batch, length, width).to(dtype),
        "input_gate_weight": (torch.randn(blocks, w, w) * w**-0.5).to(dtype).float(),
        "input_gate_bias": torch.randn(blocks, w) * 0.5,
        "a_gate_weight": (torch.randn(blocks, w, w) * w**-0.5).to(dtype).float(),
        "a_gate_bias": torch.randn(blocks, w) * 0.5,
        "a_param": torch.log(torch.expm1(-torch.log(squared) / 2)),
    }
    return {name: t.to(DEVICE).requires_grad_() for name, t in inputs.items()}


def run(inputs: dict[str, Tensor], reset: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The fused mixer with its final state."""
    y, final_state = rglru_mixer(**inputs, reset=reset, initial_state=state, output_final_state=True, backend="triton")
    assert final_state is not None
    return y, final_state


def compare(
    inputs: dict[str, Tensor],
    reset: Tensor | None = None,
    state: Tensor | None = None,
    bounds: tuple[float, float] = (2e-6, 2e-5),
) -> None:
    """Outputs, final state and every gradient against the loop, in relative norm."""
    actual, expected = run(inputs, reset, state), rglru_mixer_loop(**inputs, reset=reset, initial_state=state)
    leaves = [*inputs.values(), *([] if state is None else [state])]
    cotangents = (torch.randn_like(actual[0]), torch.randn_like(actual[1]))
    grads, true_grads = (gradients(pair, leaves, cotangents) for pair in (actual, expected))
    for name, value, truth in zip(("y", "final_state"), actual, expected, strict=True):
        assert relative_error(value, truth) < bounds[0], name
    for name, value, truth in zip([*inputs, "initial_state"], grads, true_grads, strict=False):
        assert relative_error(value, truth) < bounds[1], name


def state_for(inputs: dict[str, Tensor]) -> Tensor:
    return torch.randn(inputs["x"].shape[0], inputs["x"].shape[2], device=DEVICE).requires_grad_()


@pytest.mark.parametrize(
    ("blocks", "w"),
    [(3, 4), (1, 16), (2, 24), (1, 64), (1, 72), (1, 128), (1, 160)],
    ids=lambda n: str(n),
)
def test_widths(blocks: int, w: int) -> None:
    """Blocks narrower than a tile, whole ones, and blocks cut into slices, with resets and an initial state."""
    inputs = draw(1, 41, blocks, w)
    compare(inputs, random_reset(1, 41).to(DEVICE), state_for(inputs))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 79])
def test_lengths_about_the_tile(length: int) -> None:
    inputs = draw(1, length, 1, 16)
    reset = random_reset(1, length, 0.05).to(DEVICE) if length % 3 else None
    compare(inputs, reset, state_for(inputs) if length % 2 == 0 else None)


@pytest.mark.parametrize(
    ("with_reset", "with_state"), [(False, False), (False, True), (True, False), (True, True)], ids=str
)
def test_rows(with_reset: bool, with_state: bool) -> None:
    """Rows of several documents and segments; without a reset mask, only a fresh row's token 0 is a first token."""
    inputs = draw(3, 70, 2, 16)
    reset = torch.rand(3, 70, device=DEVICE) < 0.05 if with_reset else None
    compare(inputs, reset, state_for(inputs) if with_state else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("w", [16, 160])
def test_half_precision(dtype: torch.dtype, w: int) -> None:
    """Exact inputs, float32 inside, roundings where values leave (the interpreter truncates bfloat16)."""
    eps = torch.finfo(dtype).eps
    inputs = draw(1, 37, 1, w, dtype)
    compare(inputs, random_reset(1, 37).to(DEVICE), bounds=(eps, 2 * eps))


@pytest.mark.parametrize(
    ("batch", "length", "width", "with_state"), [(2, 1, 3, True), (1, 65, 70, False), (2, 40, 16, True)]
)
def test_from_logits(batch: int, length: int, width: int, with_state: bool) -> None:
    reset = random_reset(batch, length, 0.05) if length > 1 else None
    compare_with_loop(
        RGLRU_CASE, batch, length, width, reset=reset, with_state=with_state, tolerance=2e-6, backend="triton"
    )


def test_only_the_final_state_has_a_gradient() -> None:
    inputs = draw(1, 20, 1, 16)
    expected = rglru_mixer_loop(**inputs)[1]
    actual = run(inputs)[1]
    cotangent = torch.randn_like(actual)
    leaves = list(inputs.values())
    grads = torch.autograd.grad(actual, leaves, cotangent)
    truths = torch.autograd.grad(expected, leaves, cotangent.double())
    for name, value, truth in zip(inputs, grads, truths, strict=True):
        assert relative_error(value, truth) < 2e-5, name


def test_strided_input_and_gradient() -> None:
    """A slice of a wider tensor is read where it lies, a transposed one is copied; a broadcast gradient is taken."""
    inputs = draw(2, 20, 1, 16)
    wide = torch.randn(2, 20, 40, device=DEVICE)
    for x in (wide[..., 4:20], torch.randn(16, 20, 2, device=DEVICE).permute(2, 1, 0)):
        strided, dense = (
            torch.autograd.grad(run({**inputs, "x": value.detach().requires_grad_()})[0].sum(), inputs["a_param"])[0]
            for value in (x, x.contiguous())
        )
        assert torch.equal(strided, dense)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("boundary", [16, 21])
def test_one_document_never_reaches_another(boundary: int, bad: float) -> None:
    """Whatever stands in one document, every bit of the other's outputs and gradients is the same."""
    inputs = draw(1, 50, 1, 16)
    reset = reset_of_lengths([boundary, 50 - boundary]).to(DEVICE)
    cotangent = torch.randn(1, 50, 16, device=DEVICE)

    def gradient_of(x: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        x = x.detach().clone().requires_grad_()
        y, _ = run({**inputs, "x": x}, reset)
        (grad,) = torch.autograd.grad(y[:, tokens], x, cotangent[:, tokens])
        return y.detach(), grad

    first, second = slice(0, boundary), slice(boundary, 50)
    for changed, kept in ((first, second), (second, first)):
        x = inputs["x"].detach().clone()
        y, grad = gradient_of(x, kept)
        assert grad[:, changed].count_nonzero() == 0
        x[:, changed.stop - 1 if changed is first else changed.start] = bad
        spoilt_y, spoilt_grad = gradient_of(x, kept)
        assert torch.equal(y[:, kept], spoilt_y[:, kept])
        assert torch.equal(grad[:, kept], spoilt_grad[:, kept])
        assert not spoilt_y[:, changed].isfinite().all()


@pytest.mark.parametrize("logit", [20.0, 100.0, -20.0, -100.0])
def test_driven_gates(logit: float) -> None:
    """Gates driven to their ends: finite, and equal to the loop."""
    length, width = 80, 16
    x = torch.randn(1, length, width, device=DEVICE).requires_grad_()
    gates = [torch.full((1, length, width), sign * logit, device=DEVICE).requires_grad_() for sign in (1, -1)]
    for a_param in (-8.0, 0.0, 30.0):
        leaves = [x, *gates, torch.full((width,), a_param, device=DEVICE).requires_grad_()]
        for li, la in ((gates[0], gates[0]), (gates[1], gates[0])):
            y, _ = rglru(x, li, la, leaves[3], backend="triton")
            expected, _ = rglru_loop(x, li, la, leaves[3])
            assert y.isfinite().all()
            assert (y - expected).norm() <= 2e-6 * (x.norm() + expected.norm())
            for grad in gradients((y, y), leaves, (torch.randn_like(y), torch.zeros_like(y))):
                assert grad.isfinite().all()


def test_radius_next_to_one_keeps_the_state() -> None:
    """|a| within 1e-4 of 1, bfloat16 activations: the state of the first token outlasts the row as the loop says."""
    length, width = 300, 16
    x = torch.zeros(1, length, width, dtype=torch.bfloat16, device=DEVICE)
    x[:, 0] = 1
    la = torch.full((1, length, width), -5.0, dtype=torch.bfloat16, device=DEVICE)
    a_param = torch.full((width,), -6.3, device=DEVICE)
    _, state = rglru(x, torch.zeros_like(la), la, a_param, output_final_state=True, backend="triton")
    expected = rglru_loop(x, torch.zeros_like(la), la, a_param)[1]
    assert state is not None
    assert float(expected.min()) > 0.47
    assert relative_error(state, expected) < 1e-5


def test_same_bits_every_time() -> None:
    inputs = draw(2, 70, 1, 16)
    reset = random_reset(2, 70, 0.03).to(DEVICE)
    cotangent = torch.randn(2, 70, 16, device=DEVICE)
    runs = []
    for _ in range(2):
        y, _ = run(inputs, reset)
        runs.append([y, *torch.autograd.grad(y, list(inputs.values()), cotangent)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("w", "most"), [(16, 5), (96, 6)])
def test_launches(w: int, most: int) -> None:
    """Forward and backward together, gates, recurrence and every gradient."""
    inputs = draw(1, 70, 1, w)
    with count_launches() as names:
        run(inputs)[0].sum().backward()
    assert len(names) <= most, names


@pytest.mark.parametrize("with_mask", [False, True])
def test_registration(with_mask: bool) -> None:
    """Schema, fake tensors and autograd registration of the ops."""
    inputs = draw(1, 20, 1, 16)
    reset = random_reset(1, 20).to(DEVICE) if with_mask else None
    state = None if with_mask else state_for(inputs)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel._mixer, (*inputs.values(), reset, state, True, ""), test_utils=tests)
    x, a_param = inputs["x"], inputs["a_param"]
    logits = torch.randn_like(x).requires_grad_()
    torch.library.opcheck(kernel._scan, (x, logits, logits, a_param, reset, state, True, ""), test_utils=tests)


def test_compiles_once_without_a_break() -> None:
    """One graph, whatever the number of documents; and the compiled call's values are the eager call's."""
    inputs = draw(1, 40, 1, 16)
    compiled_graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return graph

    compiled = torch.compile(lambda x, reset: run({**inputs, "x": x}, reset)[0] * 1.0, fullgraph=True, backend=backend)
    for lengths in ([40], [3, 37], [1, 1, 20, 18]):
        reset = reset_of_lengths(lengths).to(DEVICE)
        assert torch.equal(compiled(inputs["x"], reset), run(inputs, reset)[0])
    assert compiled_graphs == 1


def test_transformers_agrees() -> None:
    """Outputs and every gradient of transformers' RG-LRU on packed positions."""
    recurrent_gemma = pytest.importorskip("transformers.models.recurrent_gemma")
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    blocks, w = 2, 16
    config = recurrent_gemma.RecurrentGemmaConfig(lru_width=blocks * w, num_attention_heads=blocks, hidden_size=32)
    module = RecurrentGemmaRglru(config).to(DEVICE).double()
    names = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias", "recurrent_param")
    inputs = draw(1, 44, blocks, w)
    with torch.no_grad():
        for name, ours in zip(names, GATES, strict=True):
            getattr(module, name).copy_(inputs[ours])
    positions = torch.cat([torch.arange(n) for n in (17, 3, 1, 23)])[None].to(DEVICE)
    x = inputs["x"].detach().double().requires_grad_()
    expected = module(x, positions)
    actual, _ = run(inputs, positions == 0)
    assert relative_error(actual, expected) < 2e-6
    cotangent = torch.randn_like(actual)
    truths = torch.autograd.grad(expected, [x, *(getattr(module, n) for n in names)], cotangent.double())
    grads = torch.autograd.grad(actual, list(inputs.values()), cotangent)
    for name, value, truth in zip(inputs, grads, truths, strict=True):
        assert relative_error(value, truth) < 2e-5, name


def test_what_the_fused_path_takes() -> None:
    assert kernel.fits(64, torch.bfloat16)
    assert kernel.fits(160, torch.float16)
    assert not kernel.fits(300, torch.bfloat16)
    assert not kernel.fits(64, torch.float64)
    inputs = draw(1, 4, 1, 300, torch.bfloat16)
    with pytest.raises(ValueError, match="at most 256 channels a block"):
        kernel.rglru_mixer(*inputs.values(), None, None)
    with pytest.raises(TypeError, match=r"x\.dtype=torch\.float64"):
        kernel.rglru_scan(*(torch.zeros(1, 4, 8, dtype=torch.float64) for _ in range(3)), torch.zeros(8), None, None)


@pytest.mark.parametrize("columns", [1, 16, 64, 5000])
def test_segments_cover_every_tile(columns: int) -> None:
    for length in (1, 32, 33, 4097, 131072, 1_048_576):
        split = kernel_plan.split_row(length, 32, columns, 396)
        per_segment = split.tiles_per_piece * split.pieces_per_segment
        assert split.tiles * 32 >= length > (split.tiles - 1) * 32
        assert split.segments * per_segment >= split.tiles > (split.segments - 1) * per_segment
        assert split.pieces > (split.segments - 1) * split.pieces_per_segment
        assert split.segments == 1 or split.segments * columns <= 396
