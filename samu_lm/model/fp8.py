"""Matrix products of the residual blocks' linear maps in float8, by the training recipes of torchao.

A converted map casts its operands to float8 as it multiplies, in the forward and in both products of the backward
pass, and returns what it returned before: parameters, gradients and their names do not change. Everything else (norms,
convolutions, recurrences, the MLP's activation, embedding and output layer) stays as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from samu_lm.errors import ConfigError

# One scale a tensor, gradients in e5m2; or one a row, everything in e4m3 and scales that are powers of two.
RECIPES = ("none", "tensorwise", "rowwise")
# Widths, and the tokens of a batch, are inner sizes of some product: the hardware takes multiples of this.
MULTIPLE = 16
# Its outputs become decays and step sizes of a recurrence, and there are too few of them for float8 to gain time.
_LEFT_ALONE = "linear_controls"
_CAPABILITY = (8, 9)
_log = logging.getLogger(__name__)


def emulating() -> bool:
    """Whether products of float8 operands are worked out in float32, on any device (``SAMU_LM_FP8_EMULATE=1``).

    It rounds as float8 does and saves no time: for tests on machines without a GPU that has float8.
    """
    return os.environ.get("SAMU_LM_FP8_EMULATE", "0") == "1"


def check_fp8(recipe: str, device: torch.device, key: str = "fp8") -> None:
    """Refuses a recipe that cannot run.

    Args:
        recipe: one of ``RECIPES``.
        device: where the model is to run.
        key: how the user spelled the setting.

    Raises:
        ConfigError: the device has no float8 products, or torchao is not installed.
    """
    if recipe == "none":
        return
    if not emulating():
        needed = f"needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher"
        remedy = f"use another, or {key}=none"
        if device.type != "cuda":
            raise ConfigError(key, recipe, f"{needed}, which {device} is not; {remedy}")
        found = torch.cuda.get_device_capability(device)
        if found < _CAPABILITY:
            name = f"{torch.cuda.get_device_name(device)} with {found[0]}.{found[1]}"
            raise ConfigError(key, recipe, f"{needed}, which {name} is not; {remedy}")
    try:
        _torchao_float8()
    except ImportError as error:
        raise ConfigError(
            key, recipe, f"needs torchao ({error}); pip install 'samu-lm[fp8]', or use {key}=none"
        ) from error


def projections(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear maps of a module that a recipe converts, by name."""
    linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    return {name: each for name, each in linears.items() if name.rpartition(".")[2] != _LEFT_ALONE}


def convert_to_fp8(module: nn.Module, recipe: str) -> None:
    """Converts the :func:`projections` inside a module, in place; their parameters stay the same objects.

    Before the module is compiled or cut into shards. Checked beforehand: :func:`check_fp8`, and widths and tokens of a
    batch that are multiples of ``MULTIPLE``.
    """
    if recipe == "none":
        return
    float8 = _torchao_float8()
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulating())
    chosen = projections(module)
    float8.convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in chosen)
    _log.info("%d linear maps multiply in float8, %s%s", len(chosen), recipe, " (emulated)" if emulating() else "")


def _torchao_float8() -> Any:
    with _quiet("torchao", "torch.utils._pytree"):
        import torchao.float8
    return torchao.float8


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """torchao warns, as it is imported, of compiled extensions and registrations that nothing here uses."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in loggers]
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
