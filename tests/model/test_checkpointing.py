"""Activation checkpointing: the same numbers, no scan or last product repeated, many tokens in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samu_lm.model.block import in_pieces
from tests.model.test_lm import _ids as ids_of
from tests.model.test_lm import _model as build
from tests.model.test_lm import by_mixer
from tests.ops.support import random_reset, relative_error


@by_mixer
@pytest.mark.parametrize(("kind", "scans", "share"), [("selective", 1, 0.9), ("block", 2, 0.5)])
def test_activation_checkpointing_changes_nothing(
    mixer: str, kind: str, scans: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = build(mixer)
    torch.manual_seed(0)
    saving = build(mixer, activation_checkpointing=kind)
    ids, reset = ids_of(2, 50), random_reset(2, 50)
    losses: list[float] = []
    kept: list[int] = []
    runs: dict[int, int] = {}
    mix = type(plain.blocks[0].mixer).mix

    def counted(self: torch.nn.Module, *args: Any) -> Any:
        runs[id(self)] = runs.get(id(self), 0) + 1
        return mix(self, *args)

    monkeypatch.setattr(type(plain.blocks[0].mixer), "mix", counted)
    for model in (plain, saving):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            loss = model(ids, reset).square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        kept.append(sum(saved))
    assert losses[0] == losses[1]
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        # Selectively, a norm's two uses are differentiated apart and then added.
        assert torch.equal(one.grad, other.grad) or kind == "selective", name
        assert relative_error(other.grad, one.grad) < 1e-5, name
    assert kept[1] < kept[0] * share
    assert [runs[id(block.mixer)] for block in saving.blocks] == [scans] * len(saving.blocks)


@by_mixer
@pytest.mark.parametrize("kind", ["selective", "block"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled parts"])
def test_many_tokens_go_through_in_pieces(
    mixer: str, kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss and gradients, no recurrence run too often, no hidden activation longer than a piece."""
    torch.manual_seed(0)
    model = build(mixer, activation_checkpointing=kind)
    ids, reset = ids_of(2, 50), random_reset(2, 50)

    def run() -> tuple[torch.Tensor, list[torch.Tensor], int]:
        model.zero_grad()
        longest = 0

        def watch(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal longest
            longest = max(longest, args[0].shape[1])

        handles = [block.mlp.down.register_forward_pre_hook(watch) for block in model.blocks]
        loss = model(ids, reset).square().sum()
        loss.backward()
        for handle in handles:
            handle.remove()
        return loss.detach(), [p.grad.clone() for p in model.parameters()], longest

    whole, gradients, longest = run()
    assert longest == 50
    monkeypatch.setattr("samu_lm.model.block.PIECE", 16)
    monkeypatch.setattr("samu_lm.model.lm.PIECE", 16)
    mix, runs = type(model.blocks[0].mixer).mix, 0

    def counted(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        return mix(*args)

    monkeypatch.setattr(type(model.blocks[0].mixer), "mix", counted)
    keys = list(model.state_dict())
    if compiled:
        torch._dynamo.reset()
        model.compile_parts(backend="aot_eager")
        assert list(model.state_dict()) == keys
    pieces, others, longest = run()
    assert longest == 8
    assert runs == len(model.blocks) * (2 if kind == "block" else 1)
    torch.testing.assert_close(pieces, whole)
    for one, other in zip(gradients, others, strict=True):
        assert relative_error(other, one) < 1e-5


@pytest.mark.parametrize("rows", [1, 3, 12, 16, 40])
def test_pieces_have_a_multiple_of_16_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last: a product in float8 takes no other number."""
    monkeypatch.setattr("samu_lm.model.block.PIECE", 100)
    sizes: list[int] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[0] * x.shape[1])
        return 2 * x

    x = torch.randn(rows, 200, 2)
    assert torch.equal(in_pieces(watched, x), 2 * x)
    assert sum(sizes) == rows * 200
    assert len(sizes) > 1
    assert all(size % 16 == 0 for size in sizes[:-1])
    assert max(sizes) <= max(100, 16 * rows)


@by_mixer
@pytest.mark.parametrize("kind", ["selective", "block"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled parts"])
def test_the_last_product_is_not_worked_out_again(mixer: str, kind: str, compiled: bool) -> None:
    """The backward pass needs what the MLP's last product took, not what it gave."""
    model = build(mixer, activation_checkpointing=kind)
    if compiled:
        torch._dynamo.reset()
        model.compile_parts(backend="aot_eager")
        model(ids_of(2, 50)).sum().backward()
    products = 0

    def count(*_: Any) -> None:  # not reached where the product is broken off before it starts
        nonlocal products
        products += 1

    for block in model.blocks:
        block.mlp.down.register_forward_hook(count)
    loss = model(ids_of(2, 50)).sum()
    assert products == len(model.blocks)
    loss.backward()
    assert products == len(model.blocks)
