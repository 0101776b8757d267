"""Argument checks shared by the public ops; each message names the argument, its value and what would be right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATING = "float32, bfloat16, float16 or float64"


def check_activations(x: Tensor, name: str = "x") -> tuple[int, int, int]:
    """Checks a floating-point ``[B, L, W]`` tensor and returns its sizes."""
    refuse_forward_mode()
    check_floating(x, name)
    if x.dim() != 3:
        raise ValueError(f"{name}.shape={tuple(x.shape)}: must be [batch, length, width]")
    batch, length, width = x.shape
    return batch, length, width


def refuse_forward_mode() -> None:
    """The ops have reverse-mode derivatives only; torch would drop a tangent in silence.

    Raises:
        NotImplementedError: within ``torch.func.jvp``, ``jacfwd`` or ``forward_ad.dual_level``.
    """
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        raise NotImplementedError("forward-mode derivatives (jvp, jacfwd) are not implemented; use reverse mode")


def check_floating(tensor: Tensor, name: str) -> None:
    """Checks that a tensor has a floating type."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name}.dtype={tensor.dtype}: must be {FLOATING}")


def check_shape(tensor: Tensor, shape: tuple[int, ...], name: str, like: Tensor | None = None) -> None:
    """Checks a floating-point tensor's exact shape, and that it lies on the device of ``like``."""
    check_floating(tensor, name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape={tuple(tensor.shape)}: must be {list(shape)}")
    check_device(tensor, name, like)


def check_device(tensor: Tensor, name: str, like: Tensor | None) -> None:
    """Checks that two tensors lie on one device."""
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}.device={tensor.device}: must be on {like.device}, as the other arguments are")


def check_reset(reset: Tensor | None, x: Tensor) -> None:
    """Checks a reset mask: None, or bool ``[B, L]`` on x's device."""
    if reset is None:
        return
    if str(reset.dtype) != "torch.bool":
        raise TypeError(f"reset.dtype={reset.dtype}: must be torch.bool, True at each document's first token")
    if tuple(reset.shape) != tuple(x.shape[:2]):
        raise ValueError(f"reset.shape={tuple(reset.shape)}: must be [batch, length]={list(x.shape[:2])}")
    check_device(reset, "reset", x)
