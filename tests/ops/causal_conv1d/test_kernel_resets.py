"""The convolution's Triton kernels where first tokens lie at the borders of the pieces that a branch tells apart."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from samu_lm.ops import causal_conv1d
from tests.ops.causal_conv1d.oracle import conv_loop
from tests.ops.support import gradients, relative_error

kernel = importlib.import_module("samu_lm.ops.causal_conv1d.kernel")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

PIECE = 8
CHUNK = 16  # of rows as short as these
LENGTH = 37
PLACES = {
    "nowhere": [],
    "piece's start": [PIECE],
    "chunk's start": [CHUNK],
    "piece's end": [PIECE - 1],
    "chunk's end": [CHUNK - 1],
    "half a piece": [PIECE // 2, CHUNK + PIECE // 2],
    "reach before a piece": [PIECE - 1, PIECE - 3, CHUNK - 4],
    "reach after a chunk": [CHUNK + 1, CHUNK + 3, 2 * CHUNK + 2],
    "one piece of every chunk": [3, CHUNK + 11, 2 * CHUNK + 4],
    "last token": [LENGTH - 1],
    "everywhere": list(range(LENGTH)),
}


def draw(taps: int, length: int = LENGTH) -> list[Tensor]:
    """Leaves x, weight, bias, initial state."""
    shapes = [(2, length, 6), (6, taps), (6,), (2, taps - 1, 6)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def results(leaves: list[Tensor], reset: Tensor | None, cotangents: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Outputs, final state, gradients of every leaf."""
    x, weight, bias, *state = leaves
    y, final = causal_conv1d(
        x,
        weight,
        bias,
        reset=reset,
        initial_state=state[0] if state else None,
        output_final_state=True,
        backend="triton",
    )
    assert final is not None
    return [y, final, *gradients((y, final), leaves, cotangents)]


def compare(leaves: list[Tensor], reset: Tensor) -> None:
    """The kernels against the loop."""
    x, weight, bias, *state = leaves
    expected = conv_loop(x, weight, bias, reset, state[0] if state else None)
    cotangents = (torch.randn_like(expected[0]), torch.randn_like(expected[1]))
    truths = [*expected, *gradients(expected, leaves, cotangents)]
    for value, truth in zip(results(leaves, reset, cotangents), truths, strict=True):
        assert relative_error(value, truth) < 2e-6


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
def test_borders_of_pieces(places: list[int], taps: int) -> None:
    reset = torch.zeros(2, LENGTH, dtype=torch.bool)
    reset[0, places] = True  # the other row has none
    leaves = draw(taps)
    compare(leaves if taps in (2, 5) else leaves[:3], reset)


def test_more_taps_than_a_piece_has_tokens() -> None:
    reset = torch.zeros(2, LENGTH, dtype=torch.bool)
    reset[0, [4, PIECE, CHUNK + 1]] = True
    compare(draw(PIECE + 4), reset)


@pytest.mark.parametrize("chunk", [64, 256])
def test_long_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pieces as a word has bits, first tokens in the lowest and the highest."""
    monkeypatch.setattr(kernel, "_chunk", lambda x, longest: min(chunk, longest))
    monkeypatch.setattr(kernel, "_replays", type(kernel._replays)())
    length = chunk + 20
    reset = torch.zeros(2, length, dtype=torch.bool)
    reset[0, [2, chunk - 1, chunk + 9]] = True
    reset[1, chunk - PIECE] = True
    compare(draw(4, length), reset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_without_a_first_token_keep_their_bits(dtype: torch.dtype) -> None:
    """No first token at all: the results of ``reset=None``. One: the same bits wherever it does not reach."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in draw(4)]
    cotangents = (torch.randn(2, LENGTH, 6).to(dtype), torch.randn(2, 3, 6).to(dtype))
    reset = torch.zeros(2, LENGTH, dtype=torch.bool)
    plain = results(leaves, None, cotangents)
    for one, other in zip(plain, results(leaves, reset, cotangents), strict=True):
        assert torch.equal(one, other)
    reset[0, 19] = True
    cut = results(leaves, reset, cotangents)
    y, grad_x = 0, 2
    assert torch.equal(plain[y][:, :19], cut[y][:, :19])
    assert torch.equal(plain[y][:, 22:], cut[y][:, 22:])
    assert torch.equal(plain[grad_x][:, :16], cut[grad_x][:, :16])
    assert torch.equal(plain[grad_x][:, 19:], cut[grad_x][:, 19:])
    assert torch.equal(plain[y][1], cut[y][1])


@pytest.mark.parametrize("start", [PIECE - 1, CHUNK, CHUNK + 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nothing_infinite_crosses_a_border(start: int, value: float) -> None:
    """A document of inputs and incoming gradients that are not numbers changes no bit of its neighbours."""
    stop = start + 6
    reset = torch.zeros(2, LENGTH, dtype=torch.bool)
    reset[:, [start, stop]] = True
    leaves = draw(4)
    cotangents = (torch.randn(2, LENGTH, 6), torch.randn(2, 3, 6))
    before = results(leaves, reset, cotangents)
    spoilt_x, spoilt_dy = leaves[0].detach().clone(), cotangents[0].clone()
    spoilt_x[:, start:stop] = value
    spoilt_dy[:, start:stop] = value
    after = results([spoilt_x.requires_grad_(), *leaves[1:]], reset, (spoilt_dy, cotangents[1]))
    for index in (0, 2):  # y, grad x
        assert torch.equal(before[index][:, :start], after[index][:, :start])
        assert torch.equal(before[index][:, stop:], after[index][:, stop:])
    for index in (1, 5):  # final state, grad of the initial one
        assert torch.equal(before[index], after[index])


def test_strided_inputs() -> None:
    """Rows and channels that do not lie next to each other, and a mask that is a view."""
    x, weight, bias, state = draw(4)
    reset = torch.zeros(2, 2 * LENGTH, dtype=torch.bool)
    reset[0, [2 * CHUNK, 2 * CHUNK + 14]] = True
    wide = torch.randn(2, LENGTH, 9).requires_grad_()
    for view in (wide[:, :, 2:8], x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()):
        for _ in range(2):  # the second call is a replay where launches are replayed
            actual = causal_conv1d(view, weight, bias, reset=reset[:, ::2], initial_state=state, backend="triton")[0]
            expected, _ = conv_loop(view, weight, bias, reset[:, ::2], state)
            assert relative_error(actual, expected) < 2e-6
            cotangent = torch.randn_like(actual)
            pairs = zip(
                torch.autograd.grad(actual, [weight, state], cotangent),
                torch.autograd.grad(expected, [weight, state], cotangent.double()),
                strict=True,
            )
            assert all(relative_error(one, other) < 2e-6 for one, other in pairs)


def test_no_rows() -> None:
    x = torch.randn(0, LENGTH, 6)
    y, final = causal_conv1d(
        x,
        torch.randn(6, 4),
        torch.randn(6),
        reset=torch.zeros(0, LENGTH, dtype=torch.bool),
        output_final_state=True,
        backend="triton",
    )
    assert y.shape == x.shape
    assert final is not None and final.shape == (0, 3, 6)
