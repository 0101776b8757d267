"""Products in float8 on a GPU that has them: those that the emulation gives, and whole runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samu_lm.model import RecurrentLM
from samu_lm.model.fp8 import convert_to_fp8
from samu_lm.model.mixers import MIXERS
from samu_lm.training.loss import packed_nll
from tests.ops.support import relative_error

pytest.importorskip("torchao")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
)
both_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])


@both_recipes
def test_products_are_the_emulated_ones(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(emulate: bool) -> list[Tensor]:
        monkeypatch.setenv("SAMU_LM_FP8_EMULATE", str(int(emulate)))
        torch.manual_seed(0)
        holder = nn.ModuleDict({"linear": nn.Linear(192, 320)}).to("cuda")
        convert_to_fp8(holder, recipe)
        x = torch.randn(3, 112, 192, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = holder["linear"](x)
        assert y.dtype == torch.bfloat16
        y.backward(torch.randn_like(y))
        weight, bias = holder["linear"].weight.grad, holder["linear"].bias.grad
        assert x.grad is not None
        assert weight is not None and bias is not None
        assert weight.dtype == torch.float32
        return [y.detach(), x.grad, weight, bias]

    found, emulated = results(False), results(True)
    for name, value, expected in zip(("y", "x", "weight", "bias"), found, emulated, strict=True):
        assert relative_error(value, expected) < 1e-2, name


@both_recipes
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_are_finite_and_close(mixer: str, checkpointing: str, compiled: bool, recipe: str) -> None:
    def gradients(fp8: str) -> Tensor:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = RecurrentLM(200, 64, 128, 2, mixer, activation_checkpointing=checkpointing)
            tokens = torch.randint(0, 200, (2, 128))
            reset = torch.rand(2, 128) < 0.02
        convert_to_fp8(model.blocks, fp8)
        nll: Any = torch.compile(packed_nll, dynamic=False) if compiled and fp8 != "none" else packed_nll
        with torch.autocast("cuda", torch.bfloat16):
            loss = nll(model, tokens, tokens.roll(-1, 1), reset, torch.ones_like(reset))
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    torch._dynamo.reset()
    distance = relative_error(gradients(recipe), gradients("none"))
    assert 1e-2 < distance < (0.8 if mixer == "gated_delta" else 0.3)


@both_recipes
@pytest.mark.parametrize("compiled", ["false", "true"], ids=["eager", "compiled"])
def test_trains_as_bfloat16(tmp_path: Path, recipe: str, compiled: str) -> None:
    pytest.importorskip("hydra")
    from tests.training.support import load, tiny_config, train_tiny, write_corpus

    corpus = write_corpus(tmp_path, documents=60)
    small = [
        "trainer.accelerator=gpu", "trainer.precision=bf16-mixed", "model.width=64", "model.rnn_width=128",
        "model.depth=2", "data.seq_len=128", "data.batch_size=4", "trainer.max_steps=8", f"compile={compiled}",
    ]  # fmt: skip

    def losses(fp8: str) -> list[float]:
        train_tiny(tiny_config(corpus, *small, f"fp8={fp8}"), tmp_path / fp8)
        with (tmp_path / fp8 / "logs" / "metrics.csv").open(newline="") as file:
            return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]

    found, expected = losses(recipe), losses("none")
    assert found != expected
    assert found == pytest.approx(expected, rel=0.03)
    weights = load(tmp_path / recipe / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert weights.keys() == load(tmp_path / "none" / "checkpoints" / "last.ckpt")["state_dict"].keys()
