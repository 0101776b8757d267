"""Reset masks: which tokens are the first of their document.

Shapes: B rows, L tokens. A reset mask is bool ``[B, L]``, True at each document's first token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reset_from_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Reset mask from cumulative document lengths, as flash-attention's variable-length calls take them.

    Args:
        cu_seqlens: integer ``[documents + 1]``, non-decreasing, from 0 to ``batch * length``: offsets into the
            ``batch`` rows laid end to end. Empty documents (two equal offsets) mark nothing.
        batch: number of rows B.
        length: tokens per row L.

    Returns:
        bool ``[batch, length]``, True at each document's first token.

    Raises:
        TypeError: ``cu_seqlens`` is not an integer tensor.
        ValueError: it is not one-dimensional, or its offsets do not run from 0 to ``batch * length`` in order. On a
            GPU the order is checked without waiting for the device: the error is then raised by a later call.
    """
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens.dtype={cu_seqlens.dtype}: offsets must be integers")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens.shape={tuple(cu_seqlens.shape)}: must be [documents + 1]")
    if batch < 0 or length < 0:
        raise ValueError(f"batch={batch}, length={length}: must not be negative")
    total = batch * length
    offsets = cu_seqlens.long()
    in_order = (offsets[0] == 0) & (offsets[-1] == total) & (offsets[1:] >= offsets[:-1]).all()
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(in_order):
            raise ValueError(
                f"cu_seqlens={offsets.tolist()[:8]}...: offsets must run from 0 to batch*length={total} without falling"
            )
    else:
        torch._assert_async(in_order)
    # One extra slot takes the starts of empty documents at the very end, so that no shape depends on the data.
    marks = torch.zeros(total + 1, dtype=torch.bool, device=offsets.device)
    marks[offsets[:-1].clamp(0, total)] = True
    return marks[:total].view(batch, length)


def reset_from_position_ids(position_ids: Tensor) -> Tensor:
    """Reset mask from position ids that start at 0 in every document, as Hugging Face's packing collators give.

    Under left padding, whose pads carry position 1 (or repeat 0), the first real token is the one at position 0 and
    takes the reset.

    Args:
        position_ids: integer ``[B, L]``.

    Returns:
        bool ``[B, L]``, True where the position is 0.

    Raises:
        TypeError: the ids are not integers.
        ValueError: the ids are not two-dimensional.
    """
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids.dtype={position_ids.dtype}: positions must be integers")
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids.shape={tuple(position_ids.shape)}: must be [batch, length]")
    return position_ids == 0


def first_token_mask(reset: Tensor | None, initial_state: Tensor | None) -> Tensor | None:
    """The first tokens an op acts on, or None where the rule without a mask says it all.

    Without an initial state nothing precedes a row, so its first token is a first token whatever ``reset`` says.
    None means: token 0 alone without an initial state, no token at all with one.
    """
    if reset is None:
        return None
    if initial_state is not None or reset.shape[1] == 0:
        return reset
    first = reset.clone()
    first[:, 0] = True
    return first


def dense_first_token_mask(first: Tensor | None, batch: int, length: int, device: torch.device, fresh: bool) -> Tensor:
    """The mask of :func:`first_token_mask` spelt out as bool ``[batch, length]``; ``fresh`` means no initial state."""
    if first is not None:
        return first
    mask = torch.zeros(batch, length, dtype=torch.bool, device=device)
    if fresh and length:
        mask[:, 0] = True
    return mask
