"""AdamW whose weight decay reaches the matrices and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from samu_lm.errors import ConfigError


class DecayingModel(Protocol):
    """A module that says which of its parameters weight decay may shrink."""

    def decay_parameter_names(self) -> set[str]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True)
class AdamW:
    """Settings of `torch.optim.AdamW` (Loshchilov and Hutter 2019), checked when they are read.

    Attributes:
        lr: peak learning rate; the schedule multiplies it.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of the parameters that `decay_parameter_names` names.

    Raises:
        ConfigError: a value is out of range.
    """

    lr: float
    betas: Sequence[float] = field(default=(0.9, 0.95))
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if not self.lr > 0 or self.lr == float("inf"):
            raise ConfigError("optimizer.lr", self.lr, "must be a positive number")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError("optimizer.betas", list(self.betas), "must be two numbers from 0 up to but not 1")
        if not self.eps > 0:
            raise ConfigError("optimizer.eps", self.eps, "must be positive")
        if not self.weight_decay >= 0:
            raise ConfigError("optimizer.weight_decay", self.weight_decay, "must not be negative")

    def build(self, model: DecayingModel) -> torch.optim.AdamW:
        """The optimizer, fused unless the model lies in shards, in two groups of parameters: decayed and not.

        Raises:
            ValueError: `decay_parameter_names` names a parameter that the model lacks.
        """
        decayed = model.decay_parameter_names()
        parameters = dict(model.named_parameters())
        if unknown := decayed - parameters.keys():
            raise ValueError(f"decay_parameter_names={sorted(unknown)}: must be names of the model's parameters")
        groups = [
            {"params": [p for n, p in parameters.items() if (n in decayed) is flag], "decayed": flag}
            for flag in (True, False)
        ]
        options: dict[str, bool | None] = {"fused": True} if _may_fuse(parameters.values()) else {"foreach": False}
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, **options)  # type: ignore[arg-type]
        self.apply_to(optimizer)
        return optimizer

    def apply_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets these values in an optimizer, also in one whose loaded state carries those of a run's earlier part."""
        fused = _may_fuse(p for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.lr
            group["betas"] = (self.betas[0], self.betas[1])
            group["eps"] = self.eps
            group["weight_decay"] = self.weight_decay if group["decayed"] else 0.0
            group["fused"], group["foreach"] = (True, None) if fused else (None, False)


def _may_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """The fused kernel takes no mixture of whole and sharded parameters, which a model in shards has."""
    return not any(hasattr(parameter, "full_tensor") for parameter in parameters)
