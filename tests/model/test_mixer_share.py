"""The reference backend is quick enough to train with: the mixers take under half of the tiny model's training step."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import yaml
from torch.nn import functional as F

from samu_lm.config import config_dir
from samu_lm.model import RecurrentLM


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("name", ["samu_tiny", "rglru_tiny"])
def test_mixers_take_under_half_of_a_step(name: str) -> None:
    config = yaml.safe_load((config_dir() / "model" / f"{name}.yaml").read_text())
    del config["_target_"]
    model = RecurrentLM(**{**config, "vocab_size": 258})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch, length = 4, 512
    ids, reset = torch.randint(0, 258, (batch, length)), torch.rand(batch, length) < 0.005
    mixer = model.blocks[0].mixer
    x = torch.randn(batch, length, model.rnn_width, requires_grad=True)

    def step() -> None:
        loss = F.cross_entropy(model(ids, reset).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def mix() -> None:
        mixer(x, reset).sum().backward()

    step(), mix()
    # Side by side, the least of several: whatever else the machine does hits both.
    whole, part = zip(*((_seconds(step), _seconds(mix)) for _ in range(5)), strict=True)
    share = model.depth * min(part) / min(whole)
    assert share < 0.5, f"the mixers take {share:.0%} of a step"
