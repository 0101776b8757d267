"""Linear maps in float8: what is converted, what stays, and how far the numbers move. Emulated, as there is no GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samu_lm.errors import ConfigError
from samu_lm.model import RecurrentLM
from samu_lm.model.fp8 import check_fp8, convert_to_fp8, projections
from samu_lm.model.mixers import MIXERS
from samu_lm.training.loss import packed_nll
from samu_lm.training.optimizer import AdamW

CUDA = torch.device("cuda", 0)
CONVERTED = {"linear_x", "linear_y", "linear_out", "mlp.gate", "mlp.up", "mlp.down"}
CONVERTED_DELTA = {"mixer.linear_qkv", "mixer.linear_gate", "mixer.linear_out", "mlp.gate", "mlp.up", "mlp.down"}
both_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of torchao's linear map in float8, emulated."""
    monkeypatch.setenv("SAMU_LM_FP8_EMULATE", "1")
    return pytest.importorskip("torchao.float8.float8_linear")


def build(recipe: str, mixer: str = "samu", **options: Any) -> RecurrentLM:
    torch.manual_seed(0)
    model = RecurrentLM(100, 32, 64, 2, mixer, num_blocks=4, num_heads=8, **options)
    convert_to_fp8(model.blocks, recipe)
    return model


def loss_and_gradients(model: RecurrentLM, nll: Any = packed_nll) -> tuple[float, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (2, 64), generator=generator)
    reset = torch.rand(2, 64, generator=generator) < 0.05
    loss = nll(model, tokens, tokens.roll(-1, 1), reset, torch.ones_like(reset))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@both_recipes
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_blocks_linear_maps_change_and_nothing_else(float8: Any, mixer: str, recipe: str) -> None:
    plain, converted = build("none", mixer), build("none", mixer)
    parameters = dict(converted.named_parameters())
    convert_to_fp8(converted.blocks, recipe)
    found = {name for name, module in converted.named_modules() if isinstance(module, float8.Float8Linear)}
    expected = CONVERTED_DELTA if mixer == "gated_delta" else CONVERTED
    assert found == {f"blocks.{i}.{name}" for i in range(2) for name in expected}
    assert list(converted.state_dict()) == list(plain.state_dict())
    for name, parameter in converted.named_parameters():
        assert parameter is parameters[name]
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, plain.state_dict()[name])
    assert converted.flops_per_token() == plain.flops_per_token()
    assert converted.decay_parameter_names() == plain.decay_parameter_names()
    groups = [
        [[list(p.shape) for p in group["params"]] for group in AdamW(lr=1e-3).build(model).param_groups]
        for model in (plain, converted)
    ]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("mixer", MIXERS)
def test_none_converts_nothing(mixer: str) -> None:
    assert {type(linear) for linear in projections(build("none", mixer)).values()} == {nn.Linear}


def quantized(x: Tensor, dim: int | None, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """x rounded to float8 under one scale, or one along ``dim``, by definition."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale.float()).to(dtype).float() / scale.float()


@both_recipes
def test_all_three_products_are_those_of_rounded_operands(float8: Any, recipe: str) -> None:
    """Forward and both gradients: operands are scaled along the inner dimension of each product."""
    rows = recipe == "rowwise"
    e4m3, gradients = torch.float8_e4m3fn, torch.float8_e4m3fn if rows else torch.float8_e5m2
    holder = nn.ModuleDict({"linear": nn.Linear(48, 32)})
    weight, bias = (p.detach().clone() for p in holder["linear"].parameters())
    convert_to_fp8(holder, recipe)
    linear = holder["linear"]
    # Rows and columns of very different sizes: a scale along the wrong dimension would show.
    x = torch.randn(64, 48) * torch.logspace(-2, 2, 64)[:, None] * torch.logspace(-1, 1, 48)
    grad = torch.randn(64, 32) * torch.logspace(-2, 2, 64)[:, None]
    x.requires_grad_()
    y = linear(x)
    y.backward(grad)

    def q(t: Tensor, dim: int, dtype: torch.dtype = e4m3) -> Tensor:
        return quantized(t.detach(), dim if rows else None, dtype, rows)

    expected = {
        "y": (y.detach(), q(x, 1) @ q(weight, 1).T + bias),
        "x": (x.grad, q(grad, 1, gradients) @ q(weight, 0)),
        "weight": (linear.weight.grad, q(grad, 0, gradients).T @ q(x, 0)),
        "bias": (linear.bias.grad, grad.sum(0)),
    }
    for name, (found, by_hand) in expected.items():
        assert isinstance(found, Tensor)
        assert distance(found, by_hand) < 2e-3, name
    exact = x.detach() @ weight.T + bias
    assert 1e-2 < distance(y.detach(), exact) < 0.1


@both_recipes
@pytest.mark.parametrize(("mixer", "bound"), [("samu", 0.25), ("rglru", 0.25), ("gated_delta", 0.8)])
def test_gradients_are_those_of_the_model_within_rounding(float8: Any, mixer: str, bound: float, recipe: str) -> None:
    """The gated delta rule's norm divides by outputs that may be close to 0 and so enlarges every rounding. Gradients
    that have nothing in common are 1.4 apart."""
    loss, gradients = loss_and_gradients(build(recipe, mixer))
    plain, expected = loss_and_gradients(build("none", mixer))
    assert loss != plain
    assert loss == pytest.approx(plain, rel=1e-2)
    flat = [torch.cat([each[name].flatten() for name in expected]) for each in (gradients, expected)]
    assert 1e-2 < distance(*flat) < bound


@pytest.mark.parametrize("checkpointing", ["selective", "block"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_with_activation_checkpointing(float8: Any, mixer: str, checkpointing: str) -> None:
    loss, gradients = loss_and_gradients(build("rowwise", mixer, activation_checkpointing=checkpointing))
    plain, expected = loss_and_gradients(build("rowwise", mixer))
    assert loss == plain
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("recipe", "checkpointing"), [("tensorwise", "none"), ("rowwise", "selective")])
def test_compiled(float8: Any, recipe: str, checkpointing: str) -> None:
    compiled = torch.compile(packed_nll, backend="aot_eager")
    loss, gradients = loss_and_gradients(build(recipe, activation_checkpointing=checkpointing), compiled)
    plain, expected = loss_and_gradients(build(recipe))
    assert loss == pytest.approx(plain, rel=1e-5)
    flat = [torch.cat([each[name].flatten() for name in expected]) for each in (gradients, expected)]
    assert distance(*flat) < 1e-2


class TestRefused:
    def test_on_a_cpu(self) -> None:
        with pytest.raises(ConfigError, match=r"^fp8=rowwise: needs a GPU of compute capability 8\.9 or higher, .*cpu"):
            check_fp8("rowwise", torch.device("cpu"))

    def test_on_an_older_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
        with pytest.raises(ConfigError, match=r"^--fp8=tensorwise: .* which A100 with 8\.0 is not; .*--fp8=none"):
            check_fp8("tensorwise", CUDA, "--fp8")

    def test_without_torchao(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setitem(sys.modules, "torchao", None)
        monkeypatch.setitem(sys.modules, "torchao.float8", None)
        with pytest.raises(ConfigError, match=r"^fp8=rowwise: needs torchao .*pip install 'samu-lm\[fp8\]'"):
            check_fp8("rowwise", CUDA)

    def test_none_is_never_refused(self) -> None:
        check_fp8("none", torch.device("cpu"))
