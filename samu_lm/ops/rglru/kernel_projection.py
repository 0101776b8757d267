"""What follows RG-LRU's ``gradient_kernel``: gradients through the projections of wide blocks, and the last sums.

Legend as in kernel_forward.py; here M counts a block's input channels and N1 + N2 both gates' output channels.
"""

import triton
import triton.language as tl

from samu_lm.ops.rglru.kernel_forward import inside_tile, load_rows


@triton.jit
def _load_columns(
    input_weight, a_weight, k0, M: tl.constexpr, n0, N: tl.constexpr, w: tl.constexpr, OPERAND: tl.constexpr
):
    """Rows k0.. and columns n0.. of ``[w, 2 w]``, one block's two weights side by side, 0 outside."""
    k, n = k0 + tl.arange(0, M), n0 + tl.arange(0, N)
    inside = (k < w)[:, None]
    at = k[:, None] * w + (n % w)[None, :]
    wi = tl.load(input_weight + at, mask=inside & (n < w)[None, :], other=0.0)
    wa = tl.load(a_weight + at, mask=inside & ((n >= w) & (n < 2 * w))[None, :], other=0.0)
    return (wi + wa).to(tl.float32).to(OPERAND)


@triton.jit
def _store_columns(partial_weights, part, h, H, k0, M: tl.constexpr, n0, N: tl.constexpr, w: tl.constexpr, sum_w):
    """Writes a program's sums for those rows and columns."""
    k, n = k0 + tl.arange(0, M), n0 + tl.arange(0, N)
    inside = (k < w)[:, None] & (n < 2 * w)[None, :]
    at = (part * (2 * H) + h + (n // w) * H)[None, :] * (w * w) + k[:, None] * w + (n % w)[None, :]
    tl.store(partial_weights + at, sum_w, mask=inside)


@triton.jit(do_not_specialize=["L", "row_parts", "tokens_per_part"])
def projection_kernel(
    x, grad_logits, input_weight, a_weight, grad_x, partial_weights,
    L, W, H, row_parts, tokens_per_part,
    w: tl.constexpr, pieces: tl.constexpr, M: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, T: tl.constexpr,
    OPERAND: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients through the projections where ``gradient_kernel`` left those of the logits in memory.

    A program owns a run of one row's tokens and M of one block's input channels: it adds to their grad_x what comes
    back through the weights, and sums their rows of both weight gradients. ``grad_logits`` is ``[B, L, H, 2 w]``, both
    gates of a block side by side, so that one product serves both; its columns in N1 + N2 >= 2 w.
    """
    pid = tl.program_id(0)
    k0 = (pid % pieces) * M
    h = (pid // pieces) % H
    part = (pid // (pieces * H)).to(tl.int64)
    b = part // row_parts
    begin = (part % row_parts) * tokens_per_part
    count = tl.minimum(tokens_per_part, L - begin).to(tl.int32)
    wi = input_weight + h * w * w
    wa = a_weight + h * w * w
    w1 = _load_columns(wi, wa, k0, M, 0, N1, w, OPERAND)
    sum1 = tl.zeros([M, N1], tl.float32)
    if N2 > 0:
        w2 = _load_columns(wi, wa, k0, M, N1, N2, w, OPERAND)
        sum2 = tl.zeros([M, N2], tl.float32)
    EXACT: tl.constexpr = w % M == 0 and 2 * w == N1 + N2
    tok = tl.arange(0, T)
    x_row = x + (b * L + begin) * W + h * w
    grad_row = grad_x + (b * L + begin) * W + h * w
    logits_row = grad_logits + (b * L + begin) * (2 * W) + h * (2 * w)
    # what is there already: read a step ahead, because the pipeline of loads is for what the products take
    target = load_rows(grad_row, W, tok, count, k0, M, w, EXACT, WHOLE)
    for step in tl.range(0, tl.cdiv(count, T), num_stages=STAGES):
        live = count - step * T
        x1 = load_rows(x_row, W, tok, live, k0, M, w, EXACT, WHOLE).to(OPERAND)
        both = load_rows(logits_row, 2 * W, tok, live, 0, N1, 2 * w, EXACT, WHOLE).to(OPERAND)
        ahead = load_rows(grad_row + T * W, W, tok, live - T, k0, M, w, EXACT, False)
        out = tl.dot(both, tl.trans(w1), input_precision="ieee")
        # not out + target, which would be taken for the product's accumulator: the product would wait for it
        out = tl.fma(out, 1.0, target.to(tl.float32))
        sum1 = tl.dot(tl.trans(x1), both, sum1, input_precision="ieee")
        if N2 > 0:
            both = load_rows(logits_row, 2 * W, tok, live, N1, N2, 2 * w, EXACT, WHOLE).to(OPERAND)
            # nor is the first product the second's: eight warps would then compute 64 rows twice
            out = tl.fma(tl.dot(both, tl.trans(w2), input_precision="ieee"), 1.0, out)
            sum2 = tl.dot(tl.trans(x1), both, sum2, input_precision="ieee")
        k = tl.arange(0, M)
        inside = inside_tile(tok, live, k0 + k, w, EXACT, WHOLE)
        tl.store(grad_row + k0 + (tok[:, None] * W + k[None, :]), out.to(grad_x.dtype.element_ty), mask=inside)
        target = ahead
        x_row += T * W
        grad_row += T * W
        logits_row += T * (2 * W)
    _store_columns(partial_weights, part, h, H, k0, M, 0, N1, w, sum1)
    if N2 > 0:
        _store_columns(partial_weights, part, h, H, k0, M, N1, N2, w, sum2)


@triton.jit(do_not_specialize=["weight_parts", "vector_parts"])
def reduce_kernel(
    partial_weights, partial_vectors, total, weights, vectors, weight_parts, vector_parts, N: tl.constexpr
):
    """Adds the partial sums of every parameter in order: ``weights`` numbers of the matrices, then ``vectors``."""
    pid = tl.program_id(0)
    weight_programs = (weights + N - 1) // N
    if pid < weight_programs:
        source, size, parts, target = partial_weights, weights, weight_parts, total
    else:
        source, size, parts, target = partial_vectors, vectors, vector_parts, total + weights
        pid -= weight_programs
    n = pid * N + tl.arange(0, N)
    inside = n < size
    out = tl.zeros([N], tl.float32)
    for _ in range(parts):
        out += tl.load(source + n, mask=inside, other=0.0)
        source += size
    tl.store(target + n, out, mask=inside)
