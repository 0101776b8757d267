"""`samu-lm replay`: runs a bad optimizer step again and names the first tensor that is not finite."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samu_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.epilog = "example: samu-lm replay runs/mine/bundles/step-212.pt"
    parser.add_argument("bundle", metavar="BUNDLE", help="a file below a run's bundles/")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, or auto (default): cuda where there is one"
    )


def run(args: argparse.Namespace) -> int:
    """Prints what the step gives now, beside what it gave then. Status 0 where the fault shows again, 1 where not."""
    found = replay(Path(args.bundle).expanduser(), args.device)
    print("\n".join(found.lines()))
    return 0 if found.reproduced else 1


@dataclass
class Finding:
    """What a step gave when it was run again.

    Attributes:
        step: the optimizer step, counted from 1.
        reason: what the run had said about it.
        weight: the first weight that is not finite, before the step.
        activation: the first output that is not finite, in the order of the forward pass.
        gradient: the first gradient that is not finite, in the order of the backward pass.
        loss, norm: then and now; the norm is the whole gradient's before clipping.
        norms: of each parameter's gradient, now.
        differs: what was done otherwise than in the run.
    """

    step: int
    reason: str
    weight: str | None = None
    activation: str | None = None
    gradient: str | None = None
    loss: tuple[float, float] = (math.nan, math.nan)
    norm: tuple[float, float] = (math.nan, math.nan)
    norms: dict[str, float] = field(default_factory=dict)
    differs: str | None = None

    @property
    def first(self) -> str | None:
        """The first tensor that is not finite, of all."""
        return self.weight or self.activation or self.gradient

    @property
    def reproduced(self) -> bool:
        """Whether loss and norm are those of then, to a thousandth; NaN counts as equal to NaN."""
        return all(_close(then, now) for then, now in (self.loss, self.norm))

    def lines(self) -> list[str]:
        """The finding as text."""
        largest = sorted(self.norms.items(), key=lambda item: (math.isfinite(item[1]), -item[1]))[:5]
        same = "the same as then" if self.reproduced else "NOT the same as then; it does not lie in the step alone"
        figures = [f"{now:.6g} (then {then:.6g})" for then, now in (self.loss, self.norm)]
        return [
            f"step {self.step}: {self.reason}",
            f"first tensor that is not finite: {self.first or 'none'}",
            f"  weights:     {self.weight or 'all finite'}",
            f"  activations: {self.activation or 'all finite'}",
            f"  gradients:   {self.gradient or 'all finite'}",
            f"loss {figures[0]}, norm {figures[1]}: {same}",
            "largest gradients: " + ", ".join(f"{name} {norm:.4g}" for name, norm in largest),
            *([f"not as in the run: {self.differs}"] if self.differs else []),
        ]


def _close(then: float, now: float) -> bool:
    return then == now or (math.isnan(then) and math.isnan(now)) or math.isclose(then, now, rel_tol=1e-3)


def replay(path: Path, device: str = "auto") -> Finding:
    """Runs a bundle's step again, without its update.

    Args:
        path: the bundle.
        device: where to.

    Raises:
        ConfigError: there is no such bundle or device, or the bundle does not make a model.
    """
    import torch
    from omegaconf import OmegaConf

    from samu_lm.checkpoint import model_as_trained
    from samu_lm.data import tokenizer_from_state
    from samu_lm.training.bundle import read_bundle
    from samu_lm.training.callbacks.rng import set_rng_state
    from samu_lm.training.checks import fp8_recipe
    from samu_lm.training.gradients import gradient_norms
    from samu_lm.training.loss import packed_nll
    from samu_lm.training.run import build_model

    bundle = read_bundle(path)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else _named(device))
    cfg = OmegaConf.create(bundle["config"] | {"model": model_as_trained(bundle["config"]["model"])})
    if place.type != "cuda" and cfg.model.get("backend") == "triton":
        cfg.model.backend = "auto"
    holder = torch.nn.Module()  # names parameters as the run does
    holder.model = build_model(cfg, tokenizer_from_state(bundle["tokenizer"]).vocab_size)
    without_fp8 = _convert_to_fp8(holder.model, fp8_recipe(cfg), place)
    holder.load_state_dict(bundle["state_dict"])
    precision = str(cfg.trainer.get("precision"))
    holder.to(device=place, dtype=torch.bfloat16 if precision == "bf16-true" else None)
    autocast = torch.autocast(place.type, torch.bfloat16, enabled=precision in ("bf16-mixed", "bf16"))
    found = Finding(bundle["step"], bundle["reason"], differs=without_fp8)
    found.weight = next((_words(n, p) for n, p in holder.named_parameters() if not torch.isfinite(p).all()), None)
    set_rng_state(bundle["rng"])
    nats, targets, scale = 0.0, 0.0, bundle["averaged_over"]
    with _watched(holder, found):
        for batch in (b.to(place) for b in bundle["batches"]):
            with autocast:
                loss = packed_nll(holder.model, batch.tokens, batch.targets, batch.reset, batch.loss_mask)  # type: ignore[arg-type]
            if found.activation is None and not torch.isfinite(loss):
                found.activation = _words("the loss", loss)
            (loss / scale).backward()
            nats, targets = nats + loss.double().item(), targets + batch.loss_mask.sum().item()
    gradients = [p.grad for p in holder.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, scale / max(targets, 1))
    norms = gradient_norms(holder)
    found.norms = {name: float(norm) for name, norm in norms.items()}
    found.loss = (bundle["loss"], nats / max(targets, 1))
    found.norm = (_total(bundle["gradient_norms"]), _total(found.norms))
    return found


def _convert_to_fp8(model: Any, recipe: str, place: Any) -> str | None:
    """Float8 products as in the run; where they cannot be had, what to say of it."""
    from samu_lm.model.fp8 import check_fp8, convert_to_fp8

    try:
        check_fp8(recipe, place)
    except ConfigError as error:
        return f"without float8 products; {error}"
    convert_to_fp8(model.blocks, recipe)
    return None


def _named(device: str) -> str:
    import torch

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("--device", device, "must be cpu, cuda, cuda:1 or auto") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError("--device", device, "must be cpu, cuda, cuda:1 or auto")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", device, "there is no GPU here; use cpu")
    return device


def _total(norms: dict[str, float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms.values()))


def _words(name: str, tensor: Any) -> str:
    import torch

    bad = int((~torch.isfinite(tensor)).sum())
    return f"{name} ({bad} of {tensor.numel()} values are NaN or infinite)"


@contextmanager
def _watched(holder: Any, found: Finding) -> Iterator[None]:
    """While the context lasts, outputs of modules and gradients of parameters are looked at as they come."""
    import torch

    def tensors(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for entry in value:
                yield from tensors(entry)

    def after_forward(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            for tensor in tensors(output):
                if found.activation is None and not torch.isfinite(tensor).all():
                    found.activation = _words(f"the output of {name}", tensor)

        return hook

    def after_backward(name: str) -> Any:
        def hook(parameter: Any) -> None:
            if found.gradient is None and not torch.isfinite(parameter.grad).all():
                found.gradient = _words(f"the gradient of {name}", parameter.grad)

        return hook

    handles = [m.register_forward_hook(after_forward(n)) for n, m in holder.named_modules() if n and m is not holder]
    handles += [p.register_post_accumulate_grad_hook(after_backward(n)) for n, p in holder.named_parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
