"""Fixtures of the ops' tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch.utils._device import _device_constructors


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write shows up as NaN."""
    # torch.device(...) as a context looks the constructors up once, at its first use: not while they are replaced.
    _device_constructors()
    trace_rules.get_torch_obj_rule_map()  # and so does torch.compile, for all that follows in this process
    empty, like, new = torch.empty, torch.empty_like, Tensor.new_empty

    def filled(out: Tensor) -> Tensor:
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: filled(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: filled(like(*args, **kwargs)))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *args, **kwargs: filled(new(self, *args, **kwargs)))
