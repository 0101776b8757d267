"""Device code of the cross entropy: a token's logits are read twice, the second time mostly from the cache.

(Kept in registers between, 32,000 of them leave room for one program a multiprocessor, which then waits for memory.)
"""

import triton
import triton.language as tl

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def _load_logits(row, columns, V, stride, PADDED: tl.constexpr):
    """Some logits of a token; those from V on are none. Masked by the stride alone, whose alignment is known."""
    x = tl.load(row + columns, mask=columns < stride, other=float("-inf")).to(tl.float32)
    if PADDED:
        x = tl.where(columns < V, x, float("-inf"))
    return x


@triton.jit
def cross_entropy_kernel(
    logits, labels, losses, V, stride, IGNORED: tl.constexpr, GRADIENT: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one token, and its logits' gradient in their place; PADDED: V is less than the stride.

    Args:
        logits: ``[N, stride]``, V of a token's first ones counting; overwritten where ``GRADIENT``.
        labels: int64 ``[N]``; ``IGNORED`` counts nothing, anything else out of range makes the loss NaN.
        losses: float32 ``[N]``.
    """
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    label = tl.load(labels + token)
    counts = label != IGNORED
    inside = (label >= 0) & (label < V)
    # Before the loop, whose sums over all threads keep any of them from overwriting it first.
    target = tl.load(row + tl.where(inside, label, 0)).to(tl.float32)
    top, total = float("-inf"), 0.0
    for start in range(0, stride, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load_logits(row, columns, V, stride, PADDED)
        higher = tl.maximum(top, tl.max(x, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)
        top = higher
    loss = tl.where(inside, (top - target) + tl.log(total), float("nan"))
    tl.store(losses + token, tl.where(counts, loss, 0.0))
    if GRADIENT:
        share = 1 / total
        for start in range(0, stride, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _load_logits(row, columns, V, stride, PADDED)
            slope = tl.exp(x - top) * share - tl.where(columns == label, 1.0, 0.0)
            slope = tl.where(counts, slope, 0.0)
            tl.store(row + columns, slope.to(logits.dtype.element_ty), mask=columns < stride)
