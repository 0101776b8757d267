"""What a bad optimizer step leaves behind so that it can be run again: weights, batches, random numbers, norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samu_lm.checkpoint import check_file, load_plain
from samu_lm.data import Batch
from samu_lm.errors import ConfigError
from samu_lm.training.module import TrainingModule
from samu_lm.training.sharded import is_sharded

FORMAT = 1
_BATCH = ("tokens", "targets", "reset", "loss_mask")


def whole_weights(module: nn.Module) -> dict[str, Any]:
    """A module's state on the CPU, gathered where it lies in shards (all ranks call this; the first gets it)."""
    if is_sharded(module):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def make_bundle(
    module: TrainingModule,
    step: int,
    reason: str,
    weights: Mapping[str, Tensor],
    batches: Sequence[Batch],
    rng: Mapping[str, Any],
    loss: float,
    norms: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The content of a bundle, loadable with ``weights_only=True``.

    Args:
        module: gives config and tokenizer.
        step: the optimizer step, counted from 1.
        reason: what is bad about it.
        weights: the module's state before the step.
        batches: the step's batches, accumulated ones and those of all ranks.
        rng: the random generators' states when the step began.
        loss: nats per target.
        norms: of each parameter's gradient.
    """
    return {
        "bundle": FORMAT,
        "step": step,
        "reason": reason,
        "config": module.config,
        "tokenizer": module.tokenizer.state_dict(),
        "state_dict": dict(weights),
        "batches": [{name: getattr(batch, name) for name in _BATCH} for batch in batches],
        "averaged_over": 1,
        "rng": dict(rng),
        "loss": loss,
        "gradient_norms": {name: float(norm) for name, norm in norms.items()},
    }


def read_bundle(path: Path) -> dict[str, Any]:
    """A bundle's content, with ``batches`` as batches.

    Raises:
        ConfigError: there is no such file, or it is no bundle.
    """
    if not path.is_file():
        raise ConfigError("BUNDLE", path, "no such file; give one below a run's bundles/")
    check_file(path, "BUNDLE")  # a changed bit would pass for a step that does not come out the same
    content = load_plain(path, "BUNDLE")
    if not isinstance(content, dict) or content.get("bundle") != FORMAT:
        raise ConfigError("BUNDLE", path, f"is no bundle of format {FORMAT}; give one below a run's bundles/")
    return content | {"batches": [Batch(**batch) for batch in content["batches"]]}
