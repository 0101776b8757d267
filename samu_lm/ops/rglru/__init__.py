"""RG-LRU: the real-gated linear recurrent unit of Griffin and RecurrentGemma.

The public functions check their arguments and choose between ``reference.py`` (plain PyTorch, the definition) and
``kernel.py`` (Triton).

Shapes: B rows, L tokens, W width, H gate blocks of w = W/H channels.
"""

from __future__ import annotations

from torch import Tensor

from samu_lm.ops.backend import choose_backend
from samu_lm.ops.checks import check_activations, check_reset, check_shape
from samu_lm.ops.resets import first_token_mask


def _check_scan(x: Tensor, a_param: Tensor, reset: Tensor | None, initial_state: Tensor | None) -> tuple[int, int, int]:
    batch, length, width = check_activations(x)
    check_shape(a_param, (width,), "a_param", like=x)
    check_reset(reset, x)
    if initial_state is not None:
        check_shape(initial_state, (batch, width), "initial_state", like=x)
    return batch, length, width


def rglru(
    x: Tensor,
    input_gate_logits: Tensor,
    a_gate_logits: Tensor,
    a_param: Tensor,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """RG-LRU recurrence from its gates' logits, float32 carry; differentiable in every tensor input.

    The square root's derivative is clipped to 1000, so no gradient grows without bound as |a| nears 1.

    Args:
        x: activations ``[B, L, W]``, float32, bfloat16 or float16.
        input_gate_logits, a_gate_logits: ``[B, L, W]``, before the sigmoid.
        a_param: ``[W]``; softplus of it times 8 is the decay of a fully open gate, per token.
        reset: bool ``[B, L]``, True at each document's first token, where the input multiplier is 1. Without an
            initial state the first token of every row is a first token in any case.
        initial_state: ``[B, W]`` float32; the row then continues.
        output_final_state: return the state after the last token.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``(y, final_state)``: y ``[B, L, W]`` in x's dtype, final_state ``[B, W]`` float32 or None.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names the argument.
        RuntimeError: ``backend="triton"`` cannot run here.
    """
    _check_scan(x, a_param, reset, initial_state)
    check_shape(input_gate_logits, tuple(x.shape), "input_gate_logits", like=x)
    check_shape(a_gate_logits, tuple(x.shape), "a_gate_logits", like=x)
    chosen = choose_backend("rglru", backend, x)
    if x.numel() == 0:
        state = x.new_zeros(x.shape[0], x.shape[2]).float() if initial_state is None else initial_state.float().clone()
        return x.clone(), state if output_final_state else None
    if chosen == "triton":
        from samu_lm.ops.rglru.kernel import rglru_scan as run

        first = reset  # the kernels add a fresh row's first token themselves
    else:
        from samu_lm.ops.rglru.reference import rglru_scan as run

        first = first_token_mask(reset, initial_state)
    y, final_state = run(x, input_gate_logits, a_gate_logits, a_param, first, initial_state)
    return y, final_state if output_final_state else None


def rglru_mixer(
    x: Tensor,
    input_gate_weight: Tensor,
    input_gate_bias: Tensor,
    a_gate_weight: Tensor,
    a_gate_bias: Tensor,
    a_param: Tensor,
    *,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The whole RG-LRU mixer, block-diagonal gate projections and recurrence, as one call that a backend may fuse.

    Args:
        x: activations ``[B, L, W]``.
        input_gate_weight, a_gate_weight: ``[H, w, w]``; a block's logits are ``x_block @ weight[h] + bias[h]``.
        input_gate_bias, a_gate_bias: ``[H, w]``.
        Others, results and errors: as in :func:`rglru`.
    """
    _, _, width = _check_scan(x, a_param, reset, initial_state)
    blocks = input_gate_weight.shape[0] if input_gate_weight.dim() == 3 else 0
    if blocks < 1 or width % blocks:
        raise ValueError(
            f"input_gate_weight.shape={tuple(input_gate_weight.shape)}: must be [H, w, w] with H * w = width {width}"
        )
    w = width // blocks
    for name, tensor, shape in (
        ("input_gate_weight", input_gate_weight, (blocks, w, w)),
        ("input_gate_bias", input_gate_bias, (blocks, w)),
        ("a_gate_weight", a_gate_weight, (blocks, w, w)),
        ("a_gate_bias", a_gate_bias, (blocks, w)),
    ):
        check_shape(tensor, shape, name, like=x)
    if choose_backend("rglru", backend, x) == "triton" and x.numel():
        from samu_lm.ops.rglru import kernel

        if kernel.fits(w, x.dtype):
            gates = (input_gate_weight, input_gate_bias, a_gate_weight, a_gate_bias)
            y, final_state = kernel.rglru_mixer(x, *gates, a_param, reset, initial_state)
            return y, final_state if output_final_state else None
    from samu_lm.ops.rglru.reference import block_diagonal_linear

    return rglru(
        x,
        block_diagonal_linear(x, input_gate_weight, input_gate_bias),
        block_diagonal_linear(x, a_gate_weight, a_gate_bias),
        a_param,
        reset=reset,
        initial_state=initial_state,
        output_final_state=output_final_state,
        backend=backend,
    )


__all__ = ["rglru", "rglru_mixer"]
