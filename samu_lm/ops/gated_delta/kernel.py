"""``ssd``: the gated delta rule as a differentiable op over Triton kernels.

Chunks are prepared side by side, one scan carries the state across them, and outputs follow side by side again; the
backward pass mirrors that. Kept for it: the states between chunks, U, W and the inverses (docs/gated-delta.md).

Shapes: as in ``reference.py``; N chunks of C tokens, n = B H.
"""

# The schemas are inferred from the annotations, which must spell Optional out.
# ruff: noqa: UP045
from typing import Any, NamedTuple, Optional

import torch
import triton.language as tl
from torch import Tensor

from samu_lm.ops.backend import interpreting
from samu_lm.ops.common.launch import cdiv, launch, next_power_of_two
from samu_lm.ops.gated_delta import kernel_chunk as kernels
from samu_lm.ops.gated_delta.reference import WIDEST_KEY
from samu_lm.ops.gated_delta.rows import Inputs, Rows, fitted_chunk
from samu_lm.ops.gated_delta.taint import Tainted

# What products are made of; Triton's interpreter has no products of bfloat16.
OPERANDS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.float32 if interpreting() else tl.bfloat16,
    torch.float16: tl.float16,
}
_INPUTS = 7


class _Plan(NamedTuple):
    """Sizes of a call and what the kernels are compiled for."""

    sizes: tuple[int, int, int, int, int]  # T, H, dk, dv, n
    chunks: int
    blocks: int
    wide: dict[str, Any]
    scan: dict[str, Any]


def _plan(q: Tensor, v: Tensor, size: int) -> _Plan:
    batch, length, heads, dk = q.shape
    dv, operand = v.shape[3], OPERANDS[q.dtype]
    # float32 tiles are twice as large; narrow blocks give the scans more programs. On Hopper, Triton 3.6 compiles
    # products of half types with fewer than 64 columns wrongly: their tiles are padded.
    half = q.dtype != torch.float32
    least = 64 if half and size >= 64 else 16
    block = max(least, min(next_power_of_two(dv), 64 if half else 32))
    # Three TF32 products make one of float32 but for its last bits; the half types' inverses are rounded more coarsely.
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    shared = {
        "C": size,
        "K": max(least, next_power_of_two(dk)),
        "OPERAND": operand,
        "PRECISION": precision,
        "num_stages": 1,
    }
    return _Plan(
        (length, heads, dk, dv, batch * heads),
        cdiv(length, size),
        cdiv(dv, block),
        {**shared, "V": block, "BLOCKS": cdiv(dv, block), "num_warps": 8},
        {**shared, "V": block, "BLOCKS": cdiv(dv, block), "num_warps": 4},
    )


@torch.library.custom_op("samu_lm::gated_delta_ssd", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, log_alpha, beta, first, initial_state)
    tainted = None if first is None else Tainted(inputs)
    if tainted is not None:
        inputs = tainted.clean()
    rows, plan = Rows(inputs, size), _plan(q, v, size)
    q, k, v = (x.contiguous() for x in inputs[:3] if x is not None)
    chunks, n, dk, dv = plan.chunks, rows.n, rows.dk, rows.dv
    document = rows.document.int()
    inverse = q.new_empty(chunks, n, size, size)
    w, u = q.new_empty(chunks, n, size, dk), q.new_empty(chunks, n, size, dv)
    states = q.new_empty(chunks, n, dk, dv, dtype=torch.float32)
    final = q.new_empty(rows.batch, rows.heads, dk, dv, dtype=torch.float32)
    o = torch.empty_like(v)
    start = None if inputs.initial_state is None else inputs.initial_state.float().contiguous()
    prepared = (k, v, rows.beta, rows.g, document, rows.from_start, inverse, w, u)
    launch(kernels.prepare_kernel, chunks * n, *prepared, *plan.sizes, LEVELS=size.bit_length() - 1, **plan.wide)
    scanned = (k, w, u, rows.to_end, rows.total, final if start is None else start, states, final)
    options = {"HAS_INITIAL": start is not None, **plan.scan}
    launch(kernels.scan_kernel, n * plan.blocks, *scanned, *plan.sizes, chunks, **options)
    output = (q, k, u, states, rows.g, document, rows.from_start, o)
    launch(kernels.output_kernel, chunks * n * plan.blocks, *output, *plan.sizes, **plan.wide)
    if tainted is not None:
        o, final = tainted.outputs(o, final)
    return o, final, states, inverse, w, u


@_forward.register_fake
def _(q, k, v, log_alpha, beta, first, initial_state, size):
    batch, length, heads, dk = q.shape
    dv, chunks, n = v.shape[3], (length + size - 1) // size, batch * heads
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        q.new_empty(batch, heads, dk, dv, dtype=torch.float32),
        q.new_empty(chunks, n, dk, dv, dtype=torch.float32),
        q.new_empty(chunks, n, size, size),
        q.new_empty(chunks, n, size, dk),
        q.new_empty(chunks, n, size, dv),
    )


@torch.library.custom_op("samu_lm::gated_delta_ssd_backward", mutates_args=())
def _backward(
    grad_o: Tensor,
    grad_final_state: Tensor,
    states: Tensor,
    inverse: Tensor,
    w: Tensor,
    u: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Optional[Tensor],
    initial_state: Optional[Tensor],
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, log_alpha, beta, first, initial_state)
    tainted = None if first is None else Tainted(inputs)
    if tainted is not None:
        inputs = tainted.clean()
        grad_o, grad_final_state = tainted.clean_gradients(grad_o, grad_final_state)
    rows, plan = Rows(inputs, size), _plan(q, v, size)
    q, k, v, grad_o = (x.contiguous() for x in (*inputs[:3], grad_o) if x is not None)
    chunks, n = plan.chunks, rows.n
    document = rows.document.int()
    grad_u, grad_states = torch.empty_like(u), torch.empty_like(states)
    grad_final = grad_final_state.float().contiguous()
    grad_initial = torch.empty_like(grad_final)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_g, grad_beta = torch.empty_like(rows.beta), torch.empty_like(rows.beta)
    local = (q, k, grad_o, rows.g, document, grad_u)
    launch(kernels.local_kernel, chunks * n * plan.blocks, *local, *plan.sizes, **plan.wide)
    ends = (rows.from_start, rows.to_end, rows.total)
    adjoint = (q, k, w, grad_o, grad_final, *ends, grad_u, grad_states, grad_initial)
    launch(kernels.adjoint_kernel, n * plan.blocks, *adjoint, *plan.sizes, chunks, **plan.scan)
    given = (q, k, v, rows.beta, rows.g, document, *ends, inverse, u, states, grad_o, grad_u, grad_states)
    found = (grad_q, grad_k, grad_v, grad_g, grad_beta)
    launch(kernels.gradients_kernel, chunks * n, *given, *found, *plan.sizes, **plan.scan | {"num_warps": 8})
    of_gates = rows.unscalars(rows.grad_log_alpha(grad_g), log_alpha), rows.unscalars(grad_beta, beta)
    grads = grad_q, grad_k, grad_v, *(g.contiguous() for g in of_gates), grad_initial
    gq, gk, gv, ga, gb, gs = grads if tainted is None else tainted.gradients(grads)
    return gq, gk, gv, ga, gb, gs


@_backward.register_fake
def _(grad_o, grad_final_state, states, inverse, w, u, q, k, v, log_alpha, beta, first, initial_state, size):
    inputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_alpha, beta)]
    return (*inputs, torch.empty_like(grad_final_state, dtype=torch.float32, memory_format=torch.contiguous_format))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.size = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, grad_o: Tensor, grad_final_state: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
    tensors = saved[:_INPUTS]
    state = tensors[-1]
    *of_inputs, of_state = _backward(grad_o, grad_final_state, *saved[_INPUTS:], *tensors, ctx.size)
    return *of_inputs, None, None if state is None else of_state.to(state.dtype), None


_forward.register_autograd(_differentiate, setup_context=_save)


def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    first: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`samu_lm.ops.gated_delta_rule`. Returns o in v's dtype and the final state.

    Raises:
        TypeError: q, k and v are not of one type that the kernels take.
        ValueError: the keys are wider than the kernels take.
    """
    if q.dtype not in OPERANDS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"q.dtype={q.dtype}, k.dtype={k.dtype}, v.dtype={v.dtype}: implementation='ssd' takes float32, bfloat16 "
            "or float16, one for all three"
        )
    if q.shape[3] > WIDEST_KEY:
        raise ValueError(f"q.shape[-1]={q.shape[3]}: implementation='ssd' takes at most {WIDEST_KEY} channels of keys")
    widest = 64 if q.dtype == torch.float32 else 128  # what fits the shared memory; the function is the same
    size = fitted_chunk(q.shape[1], min(chunk_size, widest))
    o, final_state, *_ = _forward(q, k, v, log_alpha, beta, first, initial_state, size)
    return o, final_state
