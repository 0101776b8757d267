"""Kernels at both ends of a decoded token: ids to the residual stream, and the largest logit to the next id.

Letters: B rows, D model width, V vocabulary.
"""

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.decode.kernel_linear import let_next_start, wait_for_last


@triton.jit
def embed_kernel(
    tokens,
    embedding,
    scale,
    x,
    scaled,
    squares,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The residual stream x ``[B, D]`` of ids ``[B]`` int64, and what the first norm needs; a program owns a row.

    The first kernel of a token: it is started without overlap, so that every later one finds the last token's states.
    """
    let_next_start(OVERLAP)
    b = tl.program_id(0)
    channels = tl.arange(0, BLOCK)
    mask = channels < D
    gain = 1 + tl.load(scale + channels, mask=mask, other=0.0).to(tl.float32)
    row = embedding + tl.load(tokens + b) * D
    value = tl.load(row + channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + b * D + channels, value, mask=mask)
    tl.store(scaled + b * D + channels, (value * gain).to(scaled.dtype.element_ty), mask=mask)
    parts = tl.arange(0, PART_BLOCK)
    total = tl.sum(value * value, axis=0)
    tl.store(squares + b * PARTS + parts, tl.where(parts == 0, total, 0.0), mask=parts < PARTS)


@triton.jit
def choose_kernel(
    best, best_id, tokens, seen, V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """The id of the row's largest logit, the lowest of equals, to tokens ``[B]``; counts the token in seen ``[B]``."""
    b = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    mask = parts < PARTS
    wait_for_last(OVERLAP)
    values = tl.load(best + b * PARTS + parts, mask=mask, other=float("-inf"))
    ids = tl.load(best_id + b * PARTS + parts, mask=mask, other=V)
    chosen = tl.min(tl.where(values == tl.max(values, axis=0), ids, V), axis=0)
    # Logits that are all NaN have no largest; the id stays one that can be embedded.
    tl.store(tokens + b, tl.minimum(chosen, V - 1).to(tl.int64))
    tl.store(seen + b, tl.load(seen + b) + 1)
