"""RG-LRU forward kernel: gates and recurrence in one program, segment by segment (see docs/kernels-rglru.md).

A program owns one segment (a run of tiles of T tokens) of one row, for M channels of one gate block. The same kernel
runs twice: with SUMMARY it reduces its segment to one map h -> A h + V per channel, from its end back to the nearest
first token; without, it folds the maps of the segments before its own into a carry and writes y, and the state before
every tile for the backward pass.

Legend: B rows, L tokens, W width, w channels of a gate block, M rows of the tile, T tokens of the tile, K1 + K2 >= w
inner size of the gate products in one or two powers of two, tok a token within its tile, ch a channel within its slice.
"""

import triton
import triton.language as tl

from samu_lm.ops.rglru.kernel_tile import (
    LOG2E,
    advance,
    column_tokens,
    decay_rate,
    fold_segments,
    reduce_tile,
    states,
    thread_channels,
    threads_to_tile,
    tile_to_threads,
    transition,
    two_sigmoids,
)


@triton.jit
def load_weight(weight, k0, K: tl.constexpr, c0, M: tl.constexpr, w: tl.constexpr, OPERAND: tl.constexpr):
    """Rows k0.. and columns c0.. of one block's ``[w, w]`` weight, 0 outside."""
    k, ch = k0 + tl.arange(0, K), c0 + tl.arange(0, M)
    inside = (k < w)[:, None] & (ch < w)[None, :]
    return tl.load(weight + k[:, None] * w + ch[None, :], mask=inside, other=0.0).to(tl.float32).to(OPERAND)


@triton.jit
def load_both(input_weight, a_weight, k0, K: tl.constexpr, c0, M: tl.constexpr, w: tl.constexpr, OPERAND: tl.constexpr):
    """Both gates' weights side by side, ``[K, 2 M]``: one product with it costs one wait for the tensor cores."""
    wi = load_weight(input_weight, k0, K, c0, M, w, OPERAND)
    wa = load_weight(a_weight, k0, K, c0, M, w, OPERAND)
    return tl.reshape(tl.permute(tl.join(wi, wa), (0, 2, 1)), [K, 2 * M])


@triton.jit
def apart(both, M: tl.constexpr, T: tl.constexpr):
    """The two halves of ``[2 M, T]``."""
    return tl.split(tl.permute(tl.reshape(both, [2, M, T]), (1, 2, 0)))


@triton.jit
def pick_rows(k0, K: tl.constexpr, c0, M: tl.constexpr, OPERAND: tl.constexpr):
    """The 0/1 matrix ``[M, K]`` whose product with x^T is the slice's own channels, in float32 and in column order."""
    return ((k0 + tl.arange(0, K))[None, :] == (c0 + tl.arange(0, M))[:, None]).to(tl.float32).to(OPERAND)


@triton.jit
def load_rows(row, stride, tok, tokens, k0, K: tl.constexpr, limit):
    """``[T, K]`` of activations: tokens ``tok`` of the tile, channels k0..; 0 from ``tokens`` and ``limit`` on."""
    k = k0 + tl.arange(0, K)
    inside = (tok < tokens)[:, None] & (k < limit)[None, :]
    return tl.load(row + tok[:, None] * stride + k[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(row, stride, tok, tokens, tile, M: tl.constexpr, limit):
    """Writes ``[M, T]`` (column order) as tokens by channels."""
    ch = tl.arange(0, M)
    inside = (tok < tokens)[:, None] & (ch < limit)[None, :]
    tl.store(row + tok[:, None] * stride + ch[None, :], tl.trans(tile), mask=inside)


@triton.jit
def project(w1, x1, w2, x2, TWO: tl.constexpr):
    """w1 @ x1 (+ w2 @ x2) in float32."""
    out = tl.dot(w1, x1, input_precision="ieee")
    if TWO:
        out = tl.dot(w2, x2, out, input_precision="ieee")
    return out


@triton.jit
def needs_selects(first, row_tokens, t0, tokens, T: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr):
    """Whether the tile holds a first token, or ends beyond its row; ``row_tokens`` is the offset of the tile's mask."""
    selects = tokens < T
    if HAS_FIRST:
        n = tl.arange(0, T)
        marks = tl.load(first + row_tokens + n, mask=n < tokens, other=0).to(tl.int32)
        selects = selects | (tl.max(marks, 0) > 0)
    elif not HAS_STATE:
        selects = selects | (t0 == 0)
    return selects


@triton.jit
def first_tokens(first, row_tokens, t0, tok, tokens, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr):
    """Which of the tile's tokens are first tokens: bool ``[T]`` in the order of ``tok``."""
    if HAS_FIRST:
        return tl.load(first + row_tokens + tok, mask=tok < tokens, other=0).to(tl.int32) > 0
    if HAS_STATE:
        return tok < 0
    return t0 + tok == 0


@triton.jit
def locate(pid, slices: tl.constexpr, H, B):
    """Slice, gate block, row and segment of a program; row and segment are int64, so that offsets built on them are."""
    row = (pid // (slices * H)).to(tl.int64)
    return pid % slices, (pid // slices) % H, row % B, row // B


@triton.jit
def tiles_to_reset(first, row_tokens, count, T: tl.constexpr, FROM_END: tl.constexpr, N: tl.constexpr):
    """How many of a run's tiles lie between one of its ends and its first token nearest to that end, itself included.

    Nothing beyond that token reaches the end, so a summary of the run need not visit it. ``row_tokens`` is the offset
    of the run's mask, ``count`` its number of tokens; N tokens are looked at a time.
    """
    tiles = (count + T - 1) // T
    needed = tiles
    at = tiles * 0
    while at < count:
        n = at + tl.arange(0, N)
        if FROM_END:
            token = count - 1 - n
        else:
            token = n
        marked = tl.load(first + row_tokens + token, mask=n < count, other=0).to(tl.int32) > 0
        nearest = tl.min(tl.where(marked, n, count), 0)
        at += N
        if nearest < count:
            at = count
            if FROM_END:
                needed = tiles - (count - 1 - nearest) // T
            else:
                needed = nearest // T + 1
    return needed


@triton.jit(do_not_specialize=["B", "L", "tiles", "tiles_per_segment", "segments"])
def forward_kernel(
    x, input_logits, a_logits, input_weight, input_bias, a_weight, a_bias, a_param, first, initial_state,
    summary_a, summary_v, y, states_out, final_state,
    B, L, W, H, x_stride_b, x_stride_l, tiles, tiles_per_segment, segments,
    SUMMARY: tl.constexpr, FROM_LOGITS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr,
    SAVE: tl.constexpr, w: tl.constexpr, slices: tl.constexpr, M: tl.constexpr, T: tl.constexpr, Q: tl.constexpr,
    E: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, J: tl.constexpr, PICK: tl.constexpr, OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    piece, h, b, segment = locate(tl.program_id(0), slices, H, B)
    block = h * w
    c0 = piece * M
    limit = tl.minimum(w - c0, W - block - c0)
    ch = tl.arange(0, M)
    own = ch < limit
    tch = thread_channels(M)
    towns = tch < limit
    tok = column_tokens(T, Q, E)
    K: tl.constexpr = T // Q
    TWO: tl.constexpr = K2 > 0

    rate = decay_rate(tl.load(a_param + block + c0 + ch, mask=own, other=0.0).to(tl.float32))[:, None]
    if not FROM_LOGITS:
        wi = input_weight + h * w * w
        wa = a_weight + h * w * w
        w1 = tl.trans(load_both(wi, wa, 0, K1, c0, M, w, OPERAND))
        w2 = w1
        if TWO:
            w2 = tl.trans(load_both(wi, wa, K1, K2, c0, M, w, OPERAND))
        bias_i = tl.load(input_bias + block + c0 + ch, mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
        bias_a = tl.load(a_bias + block + c0 + ch, mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
        if PICK:
            pick1 = pick_rows(0, K1, c0, M, OPERAND)
            pick2 = pick1
            if TWO:
                pick2 = pick_rows(K1, K2, c0, M, OPERAND)

    state_column = b * W + block + c0 + tch
    carry = tl.zeros([M], tl.float32)
    product = tl.full([M], 1.0, tl.float32)
    if not SUMMARY:
        if HAS_STATE:
            carry = tl.load(initial_state + state_column, mask=towns, other=0.0).to(tl.float32)
        carry = fold_segments(
            carry, summary_a, summary_v, segment * 0, 1, segment.to(tl.int32), B, W, state_column, towns, HAS_FIRST, J
        )

    begin = segment * tiles_per_segment
    count = tl.minimum(tiles_per_segment, tiles - begin).to(tl.int32)
    visits = count
    if SUMMARY and HAS_FIRST:
        run = tl.minimum(count * T, L - begin * T).to(tl.int32)
        visits = tiles_to_reset(first, b * L + begin * T, run, T, True, 1024)
    for step in tl.range(0, visits, num_stages=STAGES):
        if SUMMARY:
            tile = begin + count - 1 - step
        else:
            tile = begin + step
        t0 = tile * T
        tokens = (L - t0).to(tl.int32)
        row_tokens = b * L + t0
        x_row = x + b * x_stride_b + t0 * x_stride_l + block
        if FROM_LOGITS:
            logits_row = row_tokens * W + block + c0
            xf = tl.trans(load_rows(x_row + c0, x_stride_l, tok, tokens, 0, M, limit)).to(tl.float32)
            li = tl.trans(load_rows(input_logits + logits_row, W, tok, tokens, 0, M, limit)).to(tl.float32) * -LOG2E
            la = tl.trans(load_rows(a_logits + logits_row, W, tok, tokens, 0, M, limit)).to(tl.float32) * -LOG2E
        else:
            x1 = tl.trans(load_rows(x_row, x_stride_l, tok, tokens, 0, K1, w).to(OPERAND))
            x2 = x1
            if TWO:
                x2 = tl.trans(load_rows(x_row, x_stride_l, tok, tokens, K1, K2, w).to(OPERAND))
            li, la = apart(project(w1, x1, w2, x2, TWO), M, T)
            li = li * -LOG2E + bias_i
            la = la * -LOG2E + bias_a
            if PICK:
                xf = project(pick1, x1, pick2, x2, TWO)
            else:
                xf = tl.trans(load_rows(x_row + c0, x_stride_l, tok, tokens, 0, M, limit)).to(tl.float32)
        i, r = two_sigmoids(li, la)
        a, left = transition(r, rate)
        b_in = tl.sqrt(left + left * a)
        selects = needs_selects(first, row_tokens, t0, tokens, T, HAS_FIRST, HAS_STATE)
        if selects:
            starts = first_tokens(first, row_tokens, t0, tok, tokens, HAS_FIRST, HAS_STATE)[None, :]
            beyond = (tok >= tokens)[None, :]
            a = tl.where(starts, 0.0, tl.where(beyond, 1.0, a))
            b_in = tl.where(starts, 1.0, tl.where(beyond, 0.0, b_in))
        a = tile_to_threads(a, M, T, Q, E)
        v = tile_to_threads(b_in * i * xf, M, T, Q, E)
        if SUMMARY:
            if selects:
                tile_a, tile_v = reduce_tile(a, v, False, True, M, Q, K)
            else:
                tile_a, tile_v = reduce_tile(a, v, False, False, M, Q, K)
            # this tile's map, then that of the tiles behind it
            carry = advance(product, carry, tile_v, HAS_FIRST)
            product = product * tile_a
        else:
            if SAVE:
                tl.store(states_out + tile * B * W + state_column, carry, mask=towns)
            if selects:
                h_all, carry = states(a, v, carry, True, M, Q, K)
            else:
                h_all, carry = states(a, v, carry, False, M, Q, K)
            out = threads_to_tile(h_all, M, T, Q, E).to(y.dtype.element_ty)
            store_rows(y + row_tokens * W + block + c0, W, tok, tokens, out, M, limit)

    if SUMMARY:
        at = segment * B * W + state_column
        tl.store(summary_a + at, product, mask=towns)
        tl.store(summary_v + at, carry, mask=towns)
    elif segment == segments - 1:
        tl.store(final_state + state_column, carry, mask=towns)
