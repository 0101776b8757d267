from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samu_lm.training.loss import packed_nll, summed_cross_entropy


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 50, bias=False)


def example(rows: int = 3, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, length, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (rows, length), generator=generator)
    return hidden, targets, torch.rand(rows, length, generator=generator) < 0.6


def gradients(layer: nn.Linear, chunk_elements: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, targets, mask = example()
    layer.zero_grad()
    loss = summed_cross_entropy(hidden, targets, mask, layer, 50, chunk_elements)
    loss.backward()
    assert hidden.grad is not None
    assert layer.weight.grad is not None
    return loss.detach(), hidden.grad, layer.weight.grad.clone()


def test_is_the_sum_over_targets(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    expected = F.cross_entropy(layer(hidden[mask]), targets[mask], reduction="sum")
    torch.testing.assert_close(summed_cross_entropy(hidden, targets, mask, layer, 50), expected)


@pytest.mark.parametrize("tokens", [1, 2, 20, 21])
def test_chunks_change_neither_loss_nor_gradients(layer: nn.Linear, tokens: int) -> None:
    whole, chunked = gradients(layer, 10**9), gradients(layer, tokens * 50)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b)


def test_no_more_logits_than_a_chunk_are_made_at_once(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    sizes: list[int] = []

    def logits(h: Tensor) -> Tensor:
        sizes.append(h.shape[0] * 50)
        return layer(h)

    summed_cross_entropy(hidden, targets, mask, logits, 50, chunk_elements=4 * 50).backward()
    assert max(sizes) == 200
    assert sum(sizes) == 2 * 21 * 50  # made again in the backward pass
    with torch.no_grad():
        sizes.clear()
        summed_cross_entropy(hidden, targets, mask, logits, 50, chunk_elements=4 * 50)
        assert sum(sizes) == 21 * 50


def test_is_float32_whatever_the_logits_are(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    loss = summed_cross_entropy(hidden.bfloat16(), targets, mask, lambda h: layer(h.float()).bfloat16(), 50)
    assert loss.dtype == torch.float32


def test_without_targets_it_is_zero_and_so_is_the_gradient(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    loss = summed_cross_entropy(hidden, targets, torch.zeros_like(mask), layer, 50)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_packed_nll_hands_the_resets_to_the_model() -> None:
    class Model:
        vocab_size = 5

        def hidden(self, input_ids: Tensor, reset: Tensor | None = None) -> tuple[Tensor, None]:
            assert reset is not None
            return F.one_hot(input_ids, 5).float() * reset[..., None], None

        def logits(self, hidden: Tensor) -> Tensor:
            return hidden * 100

    tokens = torch.tensor([[1, 2, 3]])
    reset = torch.tensor([[True, False, True]])
    one = [torch.tensor([[i == k for i in range(3)]]) for k in range(3)]
    losses = [float(packed_nll(Model(), tokens, tokens, reset, mask)) for mask in one]
    assert losses == pytest.approx([0, torch.log(torch.tensor(5.0)).item(), 0], abs=1e-5)
