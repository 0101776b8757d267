"""The gated delta rule of Gated DeltaNet (arXiv 2412.06464): four implementations of one function.

``recurrent`` (``reference.py``) is the definition, token by token. ``chunked`` and ``chunked_fat`` (``chunked.py``) are
matrix products over chunks of tokens; the second keeps more for its backward pass. ``ssd`` (``kernel.py``) is the same
in Triton kernels.

Shapes: B rows, T tokens, H heads, state ``[dk, dv]`` per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import FLOATING, check_reset, check_shape, refuse_forward_mode
from samu_lm.ops.gated_delta.reference import WIDEST_KEY
from samu_lm.ops.resets import first_token_mask

IMPLEMENTATIONS = ("recurrent", "chunked", "chunked_fat", "ssd")
CHUNK_SIZES = (16, 32, 64, 128)


def _check(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, initial_state: Tensor | None) -> None:
    for name, x in (("q", q), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"{name}.dtype={x.dtype}: must be {FLOATING}")
        if x.dim() != 4 or x.shape[3] < 1:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: must be [batch, tokens, heads, channels]")
    batch, length, heads, dk = q.shape
    check_shape(k, tuple(q.shape), "k", like=q)
    check_shape(v, (batch, length, heads, v.shape[3]), "v", like=q)
    check_shape(log_alpha, (batch, length, heads), "log_alpha", like=q)
    check_shape(beta, (batch, length, heads), "beta", like=q)
    if initial_state is not None:
        check_shape(initial_state, (batch, heads, dk, v.shape[3]), "initial_state", like=q)


def check_implementation(implementation: str, chunk_size: int) -> None:
    """Raises ValueError unless both name something that exists."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size={chunk_size}: must be one of {', '.join(map(str, CHUNK_SIZES))}")


def check_accelerator(q: Tensor) -> None:
    """Raises RuntimeError where the kernels of ``ssd`` cannot run on ``q``."""
    try:
        choose_backend("gated_delta_rule", "triton", q)
    except RuntimeError as error:
        raise RuntimeError(
            f"implementation='ssd' requires an accelerator; use implementation='chunked' here ({error})"
        ) from None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    implementation: str = "chunked",
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decaying state that each token corrects towards its own key and value.

    S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T with alpha = exp(log_alpha), o_t = S_t^T q_t.
    For a stable recurrence keys have norm 1 and beta lies in [0, 2]; neither is checked. Differentiable once in every
    tensor input.

    Args:
        q, k: ``[B, T, H, dk]``, float32, bfloat16, float16 or (not ``ssd``) float64.
        v: ``[B, T, H, dv]``.
        log_alpha: ``[B, T, H]``, at most 0; -inf drops the state, as a reset of that head does.
        beta: ``[B, T, H]``.
        reset: bool ``[B, T]``, True at each document's first token: the state before it is dropped. Without an initial
            state the first token of every row is a first token in any case.
        initial_state: ``[B, H, dk, dv]``; the row then continues.
        output_final_state: return the state after the last token.
        implementation: ``recurrent``, ``chunked``, ``chunked_fat`` or ``ssd``.
        chunk_size: tokens per chunk, 16, 32, 64 or 128: ``chunked`` keeps the state before each for its backward pass
            (``recurrent`` has none).

    Returns:
        ``(o, final_state)``: o ``[B, T, H, dv]`` in v's dtype; final_state ``[B, H, dk, dv]``, float32 (float64 for
        float64 inputs), or None.

    Raises:
        TypeError, ValueError: a dtype, shape, device or name is wrong; the message names the argument.
        RuntimeError: ``implementation="ssd"`` without an accelerator.
    """
    refuse_forward_mode()
    check_implementation(implementation, chunk_size)
    _check(q, k, v, log_alpha, beta, initial_state)
    check_reset(reset, q)
    if implementation == "ssd":
        check_accelerator(q)
    first = first_token_mask(reset, initial_state)
    tensors = (q, k, v, log_alpha, beta, first, initial_state)
    if v.numel() == 0:
        from samu_lm.ops.gated_delta.reference import work_dtype

        work = work_dtype(q)
        state = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[3], dtype=work)
        state = state if initial_state is None else initial_state.to(work).clone()
        return v.clone(), state if output_final_state else None
    if implementation == "recurrent":
        from samu_lm.ops.gated_delta.reference import recurrent

        with torch.autocast(q.device.type, enabled=False):  # sums in float32
            o, final_state = recurrent(*tensors)
        o = o.to(v.dtype)
    elif implementation == "ssd":
        from samu_lm.ops.gated_delta.kernel import ssd

        o, final_state = ssd(*tensors, chunk_size)
    else:
        from samu_lm.ops.gated_delta.chunked import chunked

        o, final_state = chunked(*tensors, chunk_size, implementation == "chunked_fat")
    return o, final_state if output_final_state else None


__all__ = [
    "CHUNK_SIZES",
    "IMPLEMENTATIONS",
    "WIDEST_KEY",
    "check_accelerator",
    "check_implementation",
    "gated_delta_rule",
]
