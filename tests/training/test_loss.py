from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samu_lm.ops.common.launch import count_launches
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


def gradients(layer: nn.Linear, chunk_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, targets, mask = example()
    layer.zero_grad()
    loss = summed_cross_entropy(hidden, targets, mask, layer.weight, chunk_bytes)
    loss.backward()
    assert hidden.grad is not None
    assert layer.weight.grad is not None
    return loss.detach(), hidden.grad, layer.weight.grad.clone()


def test_is_the_sum_over_targets(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    expected = F.cross_entropy(layer(hidden[mask]), targets[mask], reduction="sum")
    torch.testing.assert_close(summed_cross_entropy(hidden, targets, mask, layer.weight), expected)


@pytest.mark.parametrize("tokens", [1, 2, 20, 21])
def test_chunks_change_neither_loss_nor_gradients(layer: nn.Linear, tokens: int) -> None:
    whole, chunked = gradients(layer, 10**9), gradients(layer, 4 * tokens * 64)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b)


def test_no_more_logits_than_a_chunk_are_made_at_once_and_none_twice(
    layer: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, targets, mask = example()
    sizes: list[int] = []
    logsumexp = Tensor.logsumexp

    def counted(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(logits.numel())
        return logsumexp(logits, *args, **kwargs)

    monkeypatch.setattr(Tensor, "logsumexp", counted)
    summed_cross_entropy(hidden, targets, mask, layer.weight, chunk_bytes=4 * 4 * 64).backward()
    assert max(sizes) == 200
    assert sum(sizes) == 21 * 50


@pytest.mark.parametrize("elements", [4 * 50, 10**9])
def test_is_float32_and_rounds_as_the_linear_layer_does(layer: nn.Linear, elements: int) -> None:
    """Under bfloat16 autocast, in chunks or not: a float32 loss; gradients of two roundings."""
    hidden, targets, mask = example()
    exact = gradients(layer, 10**9)
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_cross_entropy(hidden, targets, mask, layer.weight, elements)
    loss.backward()
    assert loss.dtype == torch.float32
    for value, truth in zip((loss, hidden.grad, layer.weight.grad), exact, strict=True):
        assert value is not None
        assert value.dtype == torch.float32
        assert float((value.detach() - truth).norm() / truth.norm()) < 2**-7


def test_gradient_is_scaled_by_what_follows(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    (3 * summed_cross_entropy(hidden, targets, mask, layer.weight, 50)).backward()
    scaled = hidden.grad
    _, plain, _ = gradients(layer, 10**9)
    torch.testing.assert_close(scaled, 3 * plain)


def test_without_gradients_none_are_made(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    with torch.no_grad():
        loss = summed_cross_entropy(hidden, targets, mask, layer.weight, 50)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, gradients(layer, 10**9)[0])


@pytest.mark.parametrize("elements", [4 * 50, 10**9])
@pytest.mark.parametrize("target", [-5, 50])
def test_a_target_outside_the_vocabulary_is_refused(layer: nn.Linear, target: int, elements: int) -> None:
    hidden, targets, mask = example()
    targets[0, 0] = target
    mask[0, 0] = True
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        summed_cross_entropy(hidden, targets, mask, layer.weight, elements)


def test_the_factor_behind_the_sum_is_not_rounded(layer: nn.Linear) -> None:
    """In bfloat16 the gradients scale by the float32 factor, not by its nearest bfloat16."""
    hidden, targets, mask = example()
    half = hidden.detach().bfloat16().requires_grad_()
    grads = []
    for factor in (1.0, 1 / 997):
        loss = summed_cross_entropy(half, targets, mask, layer.weight.bfloat16(), 50)
        grads.append(torch.autograd.grad(loss * factor, half)[0].double())
    scale = float((grads[0] * grads[1]).sum() / grads[0].square().sum())
    assert scale == pytest.approx(1 / 997, rel=5e-4)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_runs_on_the_backend_of_the_model(backend: str, layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model on the reference checks the loss's kernel too; in chunks, where there is one."""

    class Model:
        output_weight = layer.weight

        def hidden(self, tokens: Tensor, reset: Tensor | None = None) -> tuple[Tensor, None]:
            return example()[0], None

    model = Model()
    model.backend = backend  # type: ignore[attr-defined]
    monkeypatch.setattr("samu_lm.training.loss.MOST_CHUNKS", 3)
    monkeypatch.setattr(summed_cross_entropy, "__defaults__", (4 * 64, "auto"))
    _, targets, mask = example()
    with count_launches() as names:
        loss = packed_nll(model, targets, targets, mask, mask)
    assert names == ["cross_entropy_kernel"] * (3 if backend == "triton" else 0)
    torch.testing.assert_close(loss.detach(), gradients(layer, 10**9)[0])


def test_compiles_in_chunks(layer: nn.Linear) -> None:
    hidden, targets, mask = example()
    compiled = torch.compile(summed_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, targets, mask, layer.weight, 4 * 50)
    layer.zero_grad()
    loss.backward()
    for value, truth in zip((loss, hidden.grad, layer.weight.grad), gradients(layer, 10**9), strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("elements", [50, 10**9])
def test_without_targets_it_is_zero_and_so_is_the_gradient(layer: nn.Linear, elements: int) -> None:
    hidden, targets, mask = example()
    loss = summed_cross_entropy(hidden, targets, torch.zeros_like(mask), layer.weight, elements)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_packed_nll_hands_the_resets_to_the_model() -> None:
    class Model:
        output_weight = torch.eye(5) * 100

        def hidden(self, input_ids: Tensor, reset: Tensor | None = None) -> tuple[Tensor, None]:
            assert reset is not None
            return F.one_hot(input_ids, 5).float() * reset[..., None], None

    tokens = torch.tensor([[1, 2, 3]])
    reset = torch.tensor([[True, False, True]])
    one = [torch.tensor([[i == k for i in range(3)]]) for k in range(3)]
    losses = [float(packed_nll(Model(), tokens, tokens, reset, mask)) for mask in one]
    assert losses == pytest.approx([0, torch.log(torch.tensor(5.0)).item(), 0], abs=1e-5)
