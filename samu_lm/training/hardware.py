"""What the keys that say ``auto`` mean on the hardware at hand, and which implementation the model's ops run on."""

from __future__ import annotations

import logging

import torch
from omegaconf import DictConfig

from samu_lm.model.layers import OnBackend
from samu_lm.ops.backend import choose_backend

log = logging.getLogger(__name__)
# GPUs from this compute capability on have matrix units for bfloat16, and torch.compile makes kernels for them.
CAPABILITY = (8, 0)


def settle(cfg: DictConfig) -> DictConfig:
    """The config with ``compile: auto`` and ``trainer.precision: auto`` decided, so that records name what ran.

    Args:
        cfg: a checked config.

    Returns:
        The same config, or a changed copy: ``bf16-mixed`` and ``compile: true`` on a GPU that has matrix units for
        bfloat16, otherwise ``32-true`` and ``compile: false``.
    """
    if cfg.compile != "auto" and cfg.trainer.get("precision") != "auto":
        return cfg
    cfg = cfg.copy()
    capable = on_capable_gpu(cfg.trainer.get("accelerator", "auto"))
    if cfg.compile == "auto":
        cfg.compile = capable
    if cfg.trainer.get("precision") == "auto":
        cfg.trainer.precision = "bf16-mixed" if capable else "32-true"
    return cfg


def on_capable_gpu(accelerator: object) -> bool:
    """Whether a trainer with this ``accelerator`` runs on GPUs that all have at least :data:`CAPABILITY`."""
    if accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return False
    return all(torch.cuda.get_device_capability(i) >= CAPABILITY for i in range(torch.cuda.device_count()))


def announce(model: torch.nn.Module, device: torch.device) -> None:
    """Logs which backend each of the model's ops runs on; within a compiled model the ops themselves cannot."""
    probe = torch.empty(0, device=device)
    ops = {(module.op, str(module.backend)) for module in model.modules() if isinstance(module, OnBackend)}
    ops.add(("cross_entropy", str(getattr(model, "backend", "auto"))))
    for op, backend in sorted(ops):
        chosen = choose_backend(op, backend, probe)
        if backend != "auto":  # which says so itself
            log.info("%s runs on backend=%s, as asked", op, chosen)
