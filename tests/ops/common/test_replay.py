"""Launch sequences that are recorded once: what is filled in anew, and when a sequence may not be used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from samu_lm.ops.common import launch as launching
from samu_lm.ops.common import replay
from samu_lm.ops.common.launch import launch
from samu_lm.ops.common.replay import Replays, Slot, is_plain


class FakeKernel:
    """Stands for a compiled kernel: remembers the arguments of direct starts and of replayed ones."""

    __name__ = "fake"
    arg_names = ("a", "scale", "b", "BLOCK")

    def __init__(self) -> None:
        self.direct: list[tuple[Any, ...]] = []
        self.replayed: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", "metadata"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> FakeKernel:
            self.direct.append((grid, args, options))
            return self

        return start

    def run(self, *args: Any) -> None:
        self.replayed.append(args)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(launching, "_INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return FakeKernel()


def run(replays: Replays, kernel: FakeKernel, key: object, a: torch.Tensor, b: torch.Tensor | None) -> None:
    def build(slots: list[Slot]) -> None:
        launch(kernel, 5, slots[0].at(4), 3.0, slots[1] or slots[0], BLOCK=16, num_warps=2)

    replays._run(key, [a, b], build, 0)


def test_second_call_fills_in_new_addresses(kernel: FakeKernel) -> None:
    replays = Replays()
    one, two, other = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    run(replays, kernel, "key", one, two)
    assert len(kernel.direct) == 1
    assert kernel.direct[0][0] == (5,)
    assert kernel.direct[0][1][0].data_ptr() == one.data_ptr() + 16
    assert kernel.direct[0][2] == {"BLOCK": 16, "num_warps": 2}
    assert not kernel.replayed
    run(replays, kernel, "key", two, other)
    assert len(kernel.direct) == 1
    arguments = (two.data_ptr() + 16, 3.0, other.data_ptr(), 16)
    assert kernel.replayed == [(5, 1, 1, 77, "function", "metadata", None, None, None, *arguments)]


def test_tensors_that_were_one_may_be_two_later(kernel: FakeKernel) -> None:
    replays, one, two = Replays(), torch.zeros(64), torch.zeros(64)
    run(replays, kernel, "key", one, one)
    run(replays, kernel, "key", one, two)
    assert kernel.replayed[0][-2] == two.data_ptr()


def test_what_records_anew(kernel: FakeKernel) -> None:
    """Another key, dtype or alignment is another compilation."""
    replays, one, two = Replays(), torch.zeros(64), torch.zeros(64)
    run(replays, kernel, "key", one, two)
    for key, a, b in (
        ("other", one, two),
        ("key", one.double(), two),
        ("key", one[1:], two),
        ("key", one, None),
    ):
        before = len(kernel.direct)
        run(replays, kernel, key, a, b)
        assert len(kernel.direct) == before + 1
    assert not kernel.replayed


def test_sequences_are_not_kept_without_end(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_KEPT", 3)
    replays, one = Replays(), torch.zeros(64)
    for key in range(10):
        run(replays, kernel, key, one, None)
    assert len(replays._sequences) == 3


def test_a_failed_build_leaves_nothing(kernel: FakeKernel) -> None:
    replays, one = Replays(), torch.zeros(64)

    def build(slots: list[Slot]) -> None:
        launch(kernel, 1, slots[0], 1.0, slots[0], BLOCK=1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        replays._run("key", [one], build, 0)
    assert not replays._sequences
    run(replays, kernel, "key", one, one)
    assert not kernel.replayed


def test_watched_launches_go_one_by_one(kernel: FakeKernel) -> None:
    with launching.count_launches() as names:
        assert launching.watched()
        launch(kernel, 2, 1, 2, 3, BLOCK=4)
        launch(kernel, 0, 1, 2, 3, BLOCK=4)
    assert names == ["fake"]


def test_is_plain() -> None:
    x = torch.zeros(3)
    assert is_plain(x)
    assert is_plain(torch.nn.Parameter(x))

    class Special(torch.Tensor):
        pass

    assert not is_plain(x.as_subclass(Special))

    @contextmanager
    def mode() -> Iterator[None]:
        with torch._subclasses.FakeTensorMode():
            yield

    with mode():
        assert not is_plain(x)
    assert not torch.vmap(lambda t: torch.tensor(float(is_plain(t))))(torch.zeros(2, 3)).any()
