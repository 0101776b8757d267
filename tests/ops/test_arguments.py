"""Bad arguments are refused by name; a backend that cannot run says so; ops trace as single nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from samu_lm.ops import (
    causal_conv1d,
    gated_delta_rule,
    rglru,
    rglru_mixer,
    samu,
    samu_controls,
)
from tests.ops.support import CASES, OpCase, gradients, random_reset, relative_error

by_op = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@by_op
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 5, 8, dtype=torch.int64)}, TypeError, r"x\.dtype=torch\.int64"),
        ({"x": torch.zeros(5, 8)}, ValueError, r"x\.shape=\(5, 8\)"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"reset\.dtype=torch\.float32: must be torch\.bool"),
        ({"reset": torch.zeros(2, 6, dtype=torch.bool)}, ValueError, r"reset\.shape=\(2, 6\)"),
        ({"initial_state": torch.zeros(3, 8)}, ValueError, r"initial_state\.shape=\(3, 8\)"),
        ({"backend": "cuda"}, ValueError, r"backend='cuda': must be one of auto, reference, triton"),
        ({"reset": torch.zeros(2, 5, dtype=torch.bool, device="meta")}, ValueError, r"reset\.device=meta"),
    ],
)
def test_refused_by_name(case: OpCase, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        case.op(**{**case.draw(2, 5, 8), **change})


@by_op
def test_every_input_shape_is_checked(case: OpCase) -> None:
    for name in (*case.per_token, *case.parameters):
        inputs = case.draw(2, 5, 8)
        inputs[name] = torch.cat([inputs[name], inputs[name]], 0)[:, None]
        with pytest.raises(ValueError, match=rf"{name}\.shape"):
            case.op(**inputs)


def test_odd_width() -> None:
    vector = torch.zeros(4)
    with pytest.raises(ValueError, match=r"x\.shape\[-1\]=7: SAMU reads pairs"):
        samu(torch.zeros(1, 3, 7), torch.zeros(1, 3), torch.zeros(1, 3), vector, vector)
    with pytest.raises(ValueError, match=r"x\.shape\[-1\]=7"):
        samu_controls(torch.zeros(1, 3, 7), torch.ones(8), torch.ones(8), torch.ones(()), torch.ones(()))


def test_gate_blocks_that_do_not_fit() -> None:
    weight, bias = torch.zeros(3, 3, 3), torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"input_gate_weight\.shape=\(3, 3, 3\)"):
        rglru_mixer(torch.zeros(1, 2, 8), weight, bias, weight, bias, torch.zeros(8))
    weight, bias = torch.zeros(2, 4, 4), torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"input_gate_bias\.shape"):
        rglru_mixer(torch.zeros(1, 2, 8), weight, bias, weight, bias, torch.zeros(8))


@by_op
def test_triton_is_never_swapped_for_something_else(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"backend='triton': .* got a tensor on cpu"):
        case.run(case.draw(1, 3, 8), backend="triton")
    monkeypatch.setattr("samu_lm.ops.backend.TRITON_INSTALLED", False)
    with pytest.raises(RuntimeError, match="needs the package triton"):
        case.run(case.draw(1, 3, 8), backend="triton")


@by_op
def test_auto_says_once_what_it_took(
    case: OpCase, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samu_lm.ops.backend._told", set())
    with caplog.at_level("INFO", logger="samu_lm.ops.backend"):
        for _ in range(3):
            case.run(case.draw(1, 3, 8), backend="auto")
    assert [r.getMessage() for r in caplog.records] == [f"{case.name} runs on backend=reference for tensors on cpu"]


@by_op
def test_state_only_when_asked(case: OpCase) -> None:
    assert case.op(**case.draw(1, 3, 8))[1] is None


@pytest.mark.parametrize("with_state", [False, True])
def test_custom_ops_keep_their_contract(with_state: bool) -> None:
    """Schema, fake implementation and autograd registration of the reference's custom ops."""
    batch, length, width = 2, 9, 8
    reset = random_reset(batch, length)
    state = torch.randn(batch, width, requires_grad=True) if with_state else None
    for case, op in zip(CASES[:2], (torch.ops.samu_lm.samu_reference, torch.ops.samu_lm.rglru_reference), strict=True):
        inputs = [t.requires_grad_() for t in case.draw(batch, length, width).values()]
        torch.library.opcheck(op.default, (*inputs, reset, state))


@by_op
def test_compiled_without_a_graph_break(case: OpCase) -> None:
    """fullgraph, and one graph whatever the number of documents."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def call(inputs: dict[str, Tensor], reset: Tensor) -> tuple[Tensor, Tensor]:
        return case.run(inputs, reset)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for probability in (0.0, 0.1, 0.5):
        inputs = {k: v.requires_grad_() for k, v in case.draw(2, 20, 8).items()}
        reset = random_reset(2, 20, probability)
        leaves = list(inputs.values())
        plain, fast = case.run(inputs, reset), compiled(inputs, reset)
        cotangents = (torch.randn_like(plain[0]), torch.randn_like(plain[1]))
        for one, other in zip(plain, fast, strict=True):
            assert relative_error(other, one) < 1e-6
        for one, other in zip(gradients(plain, leaves, cotangents), gradients(fast, leaves, cotangents), strict=True):
            assert relative_error(other, one) < 1e-6
    assert counter.frame_count == 1


def test_conv_with_one_tap_sees_only_its_token() -> None:
    x = torch.randn(1, 6, 3)
    y, state = causal_conv1d(x, torch.full((3, 1), 2.0), torch.ones(3), output_final_state=True)
    torch.testing.assert_close(y, 2 * x + 1)
    assert state is not None
    assert state.shape == (1, 0, 3)


def test_dtype_of_a_parameter_is_checked() -> None:
    x = torch.zeros(1, 2, 4)
    with pytest.raises(TypeError, match=r"a_param\.dtype=torch\.int64"):
        rglru(x, x, x, torch.zeros(4, dtype=torch.int64))


def test_forward_mode_is_refused_rather_than_dropped() -> None:
    calls = {
        "samu": lambda x: samu(x, x[..., 0], x[..., 0], torch.zeros(4), torch.zeros(4))[0],
        "rglru": lambda x: rglru(x, x, x, torch.zeros(8))[0],
        "causal_conv1d": lambda x: causal_conv1d(x, torch.zeros(8, 4), torch.zeros(8))[0],
        "gated_delta_rule": lambda x: gated_delta_rule(x[..., None], x[..., None], x[..., None], -x.square(), x)[0],
    }
    x = torch.randn(1, 5, 8)
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(call, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            call(forward_ad.make_dual(x, x))
        assert call(x).shape[:2] == (1, 5), name
