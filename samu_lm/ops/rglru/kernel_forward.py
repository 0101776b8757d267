"""RG-LRU forward kernel: gates and recurrence in one program (see docs/kernels-rglru.md).

A row is cut into segments, one program each per M channels of a gate block, and segments into pieces; both are runs of
tiles of T tokens. The kernel runs twice. With SUMMARY a program reduces one piece to one map h -> A h + V per channel,
from its end back to its last first token: nothing before that reaches the end, and a piece with a first token behind it
in its segment is left out altogether. Without SUMMARY a program folds the maps between the last first token before its
segment and the segment, which gives the state that the segment starts from, and then walks its tiles: it writes y, and
the state before every tile for the backward pass.

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
    fold_pieces,
    reduce_tile,
    states,
    store_state,
    thread_channels,
    threads_to_tile,
    through,
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
def load_both(
    input_weight, a_weight, k0, K: tl.constexpr, c0, M: tl.constexpr, w: tl.constexpr, PAIRED: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Both gates' weights, ``[K, 2 M]``: one product with it costs one wait for the tensor cores."""
    wi = load_weight(input_weight, k0, K, c0, M, w, OPERAND)
    wa = load_weight(a_weight, k0, K, c0, M, w, OPERAND)
    return together(wi, wa, K, M, PAIRED)


@triton.jit
def together(first, second, K: tl.constexpr, M: tl.constexpr, PAIRED: tl.constexpr):
    """Two of ``[K, M]`` as ``[K, 2 M]``: side by side, or PAIRED, eight columns of each in turn."""
    both = tl.join(first, second)
    if PAIRED:
        both = tl.permute(tl.reshape(both, [K, M // 8, 8, 2]), (0, 1, 3, 2))
    else:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, [K, 2 * M])


@triton.jit
def apart(both, M: tl.constexpr, T: tl.constexpr, PAIRED: tl.constexpr):
    """The two halves of ``[2 M, T]``, whose rows are in the order of ``together``."""
    if PAIRED:
        first, second = tl.split(tl.permute(tl.reshape(both, [M // 8, 2, 8, T]), (0, 2, 3, 1)))
        first, second = tl.reshape(first, [M, T]), tl.reshape(second, [M, T])
    else:
        first, second = tl.split(tl.permute(tl.reshape(both, [2, M, T]), (1, 2, 0)))
    return first, second


@triton.jit
def pick_rows(k0, K: tl.constexpr, c0, M: tl.constexpr, OPERAND: tl.constexpr):
    """The 0/1 matrix ``[M, K]`` whose product with x^T is the slice's own channels, in float32 and in column order."""
    return ((k0 + tl.arange(0, K))[None, :] == (c0 + tl.arange(0, M))[:, None]).to(tl.float32).to(OPERAND)


@triton.jit
def pick_half(half: tl.constexpr, k0, K: tl.constexpr, c0, M: tl.constexpr, OPERAND: tl.constexpr):
    """``[2 M, K]``: as ``pick_rows`` in one half of the rows, in the order of PAIRED, and 0 in the other."""
    row = tl.arange(0, 2 * M)
    channel = tl.where((row // 8) % 2 == half, c0 + (row // 16) * 8 + row % 8, -1)
    return ((k0 + tl.arange(0, K))[None, :] == channel[:, None]).to(tl.float32).to(OPERAND)


@triton.jit
def pick_both(K1: tl.constexpr, K2: tl.constexpr, c0, M: tl.constexpr, PAIRED: tl.constexpr, OPERAND: tl.constexpr):
    """What picks x from the two parts of the block's channels (the first part twice if there is no second)."""
    if PAIRED:
        pick1 = pick_half(0, 0, K1, c0, M, OPERAND)
        pick2 = pick1
        if K2 > 0:
            pick2 = pick_half(0, K1, K2, c0, M, OPERAND)
    else:
        pick1 = pick_rows(0, K1, c0, M, OPERAND)
        pick2 = pick1
        if K2 > 0:
            pick2 = pick_rows(K1, K2, c0, M, OPERAND)
    return pick1, pick2


@triton.jit
def inside_tile(tok, tokens, ch, limit, EXACT: tl.constexpr, WHOLE: tl.constexpr):
    """Mask ``[T, M]`` of a tile: tokens before ``tokens`` and channels before ``limit``; None where nothing is outside.

    EXACT promises that of every channel, WHOLE that of every token.
    """
    if EXACT and WHOLE:
        inside = None
    elif EXACT:
        inside = (tok < tokens)[:, None]
    elif WHOLE:
        inside = (ch < limit)[None, :]
    else:
        inside = (tok < tokens)[:, None] & (ch < limit)[None, :]
    return inside


@triton.jit
def load_rows(row, W, tok, tokens, k0, K: tl.constexpr, limit, EXACT: tl.constexpr, WHOLE: tl.constexpr):
    """``[T, K]`` of activations: tokens ``tok`` of the tile, channels k0..; 0 from ``tokens`` and ``limit`` on."""
    k = tl.arange(0, K)
    inside = inside_tile(tok, tokens, k0 + k, limit, EXACT, WHOLE)
    target = row + k0 + (tok[:, None] * W + k[None, :])
    if inside is None:
        tile = tl.load(target)
    else:
        tile = tl.load(target, mask=inside, other=0.0)
    return tile


@triton.jit
def load_slice(
    row, W, tok, tokens, M: tl.constexpr, T: tl.constexpr, limit, RUN: tl.constexpr, EXACT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """``[M, T]`` (column order) of the slice's own channels, which start at ``row``.

    In shared memory RUN channels of all tokens follow one another. A transposing read takes 16 bytes of eight tokens at
    a time: from rows of 128 bytes that is one bank's work eight times over, from rows of 32 twice.
    """
    if RUN < M:
        ch = tl.arange(0, M // RUN)[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
        target = row + (tok[None, :, None] * W + ch)
        if EXACT and WHOLE:
            tile = tl.load(target)
        else:
            tile = tl.load(target, mask=(tok < tokens)[None, :, None] & (ch < limit), other=0.0)
        tile = tl.reshape(tl.permute(tile, (0, 2, 1)), [M, T])
    else:
        tile = tl.trans(load_rows(row, W, tok, tokens, 0, M, limit, EXACT, WHOLE))
    return tile


@triton.jit
def store_rows(row, W, tok, tokens, tile, M: tl.constexpr, limit, EXACT: tl.constexpr, WHOLE: tl.constexpr):
    """Writes ``[M, T]`` (column order) as tokens by channels."""
    ch = tl.arange(0, M)
    inside = inside_tile(tok, tokens, ch, limit, EXACT, WHOLE)
    tl.store(row + (tok[:, None] * W + ch[None, :]), tl.trans(tile), mask=inside)


@triton.jit
def project(w1, x1, w2, x2, TWO: tl.constexpr):
    """w1 @ x1 (+ w2 @ x2) in float32."""
    out = tl.dot(w1, x1, input_precision="ieee")
    if TWO:
        out = tl.dot(w2, x2, out, input_precision="ieee")
    return out


@triton.jit
def needs_selects(
    first, row_tokens, t0, tokens, T: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Whether the tile holds a first token, or ends beyond its row; ``row_tokens`` is the offset of the tile's mask."""
    selects = tokens < T
    if HAS_FIRST:
        n = tl.arange(0, T)
        if WHOLE:
            marks = tl.load(first + row_tokens + n)
        else:
            marks = tl.load(first + row_tokens + n, mask=n < tokens, other=0)
        selects = selects | (tl.max(marks.to(tl.int32), 0) > 0)
    if not HAS_STATE:
        selects = selects | (t0 == 0)
    return selects


@triton.jit
def first_tokens(first, row_tokens, t0, tok, tokens, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr):
    """Which of the tile's tokens are first tokens: bool ``[T]`` in the order of ``tok``.

    Token 0 of a row without an initial state is one, whatever the mask says.
    """
    if HAS_STATE:
        starts = tok < 0
    else:
        starts = t0 + tok == 0
    if HAS_FIRST:
        starts = starts | (tl.load(first + row_tokens + tok, mask=tok < tokens, other=0).to(tl.int32) > 0)
    return starts


@triton.jit
def locate(pid, slices: tl.constexpr, H, B):
    """Slice, gate block, row and span (segment or piece) of a program; the last two int64, as are offsets from them."""
    row = (pid // (slices * H)).to(tl.int64)
    return pid % slices, (pid // slices) % H, row % B, row // B


@triton.jit
def tokens_to_reset(first, at, count, FROM_END: tl.constexpr, N: tl.constexpr):
    """How many of a run's ``count`` tokens lie before its nearest first token, seen from its start or end.

    ``count`` if there is none. ``at`` is the offset of the run's mask; N tokens are looked at a time.
    """
    nearest = count
    looked = count * 0
    while looked < count:
        n = looked + tl.arange(0, N)
        if FROM_END:
            token = count - 1 - n
        else:
            token = n
        marked = tl.load(first + at + token, mask=n < count, other=0).to(tl.int32) > 0
        nearest = tl.min(tl.where(marked, n, count), 0)
        looked += N
        if nearest < count:
            looked = count
    return nearest


@triton.jit(do_not_specialize=["B", "L", "tiles_per_piece", "pieces_per_segment", "segments"])
def forward_kernel(
    x, input_logits, a_logits, input_weight, input_bias, a_weight, a_bias, a_param, first, initial_state,
    summary_a, summary_v, y, states_out, final_state,
    B, L, W, H, tiles_per_piece, pieces_per_segment, segments,
    SUMMARY: tl.constexpr, FROM_LOGITS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr,
    SAVE: tl.constexpr, w: tl.constexpr, slices: tl.constexpr, M: tl.constexpr, T: tl.constexpr, Q: tl.constexpr,
    E: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, J: tl.constexpr, PICK: tl.constexpr, OPERAND: tl.constexpr,
    STAGES: tl.constexpr, PAIRED: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    slice_, h, b, span = locate(tl.program_id(0), slices, H, B)
    block = h * w
    c0 = slice_ * M
    limit = tl.minimum(w - c0, W - block - c0)
    ch = tl.arange(0, M)
    own = ch < limit
    tch = thread_channels(M, PAIRED)
    towns = tch < limit
    tok = column_tokens(T, Q, E)
    K: tl.constexpr = T // Q
    TWO: tl.constexpr = K2 > 0
    EXACT: tl.constexpr = not FROM_LOGITS and w % M == 0 and w == K1 + K2

    rate = decay_rate(tl.load(a_param + block + c0 + ch, mask=own, other=0.0).to(tl.float32))[:, None]
    if not FROM_LOGITS:
        wi = input_weight + h * w * w
        wa = a_weight + h * w * w
        w1 = tl.trans(load_both(wi, wa, 0, K1, c0, M, w, PAIRED, OPERAND))
        w2 = w1
        if TWO:
            w2 = tl.trans(load_both(wi, wa, K1, K2, c0, M, w, PAIRED, OPERAND))
        bias_i = tl.load(input_bias + block + c0 + ch, mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
        bias_a = tl.load(a_bias + block + c0 + ch, mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
        if PICK:
            pick1, pick2 = pick_both(K1, K2, c0, M, PAIRED, OPERAND)

    column = b * W + block + c0
    piece_tokens = tiles_per_piece * T
    carry = tl.zeros([M], tl.float32)
    product = tl.full([M, Q], 1.0, tl.float32)
    if SUMMARY:
        # this piece's own tokens, from its end back to its last first token; none if the segment has one behind it
        begin = span * piece_tokens
        end = tl.minimum(begin + piece_tokens, L)
        count = (end - begin).to(tl.int32)
        tiles = (count + T - 1) // T
        last = tiles - 1
        if HAS_FIRST:
            segment_end = (span // pieces_per_segment + 1) * pieces_per_segment * piece_tokens
            behind = (tl.minimum(segment_end, L) - end).to(tl.int32)
            if tokens_to_reset(first, b * L + end, behind, False, 1024) < behind:
                tiles = 0
            else:
                nearest = tokens_to_reset(first, b * L + begin, count, True, 1024)
                if nearest < count:
                    tiles -= (count - 1 - nearest) // T
    else:
        begin = span * pieces_per_segment * piece_tokens
        end = tl.minimum(begin + pieces_per_segment * piece_tokens, L)
        tiles = ((end - begin + T - 1) // T).to(tl.int32)
        # the state before the segment: fold the pieces from the last first token before it, or from the row's start
        from_piece = span * 0
        if HAS_STATE:
            carry = tl.load(initial_state + column + tch, mask=towns, other=0.0).to(tl.float32)
        if HAS_FIRST:
            nearest = tokens_to_reset(first, b * L, begin.to(tl.int32), True, 4096)
            if nearest < begin:
                from_piece = (begin - 1 - nearest) // piece_tokens
        pieces = (span * pieces_per_segment - from_piece).to(tl.int32)
        carry = fold_pieces(carry, summary_a, summary_v, from_piece, 1, pieces, B, W, column, tch, towns, HAS_FIRST, J)

    carry = tl.broadcast_to(carry[:, None], [M, Q])
    # where a step's tile lies is counted on from step to step: multiplying 64-bit numbers costs issue slots
    to_next: tl.constexpr = -T if SUMMARY else T
    if SUMMARY:
        begin += last * T
    t0 = begin.to(tl.int32)
    row = (b * L + t0) * W
    x += block
    y += block + c0
    all_rows = B.to(tl.int64) * W
    saved = states_out + (t0 // T) * all_rows + column
    for _ in tl.range(0, tiles, num_stages=STAGES):
        tokens = end.to(tl.int32) - t0
        row_tokens = b * L + t0
        x_row = x + row
        if FROM_LOGITS:
            logits_row = row + block + c0
            xf = tl.trans(load_rows(x_row + c0, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(tl.float32)
            li = (
                tl.trans(load_rows(input_logits + logits_row, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(tl.float32)
                * -LOG2E
            )
            la = (
                tl.trans(load_rows(a_logits + logits_row, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(tl.float32)
                * -LOG2E
            )
        else:
            x1 = tl.trans(load_rows(x_row, W, tok, tokens, 0, K1, w, EXACT, WHOLE).to(OPERAND))
            x2 = x1
            if TWO:
                x2 = tl.trans(load_rows(x_row, W, tok, tokens, K1, K2, w, EXACT, WHOLE).to(OPERAND))
            li, la = apart(project(w1, x1, w2, x2, TWO), M, T, PAIRED)
            li = li * -LOG2E + bias_i
            la = la * -LOG2E + bias_a
            if PICK:
                xf = project(pick1, x1, pick2, x2, TWO)
                if PAIRED:
                    xf, _ = apart(xf, M, T, PAIRED)
            else:
                xf = load_slice(x_row + c0, W, tok, tokens, M, T, limit, RUN, EXACT, WHOLE).to(tl.float32)
        i, r = two_sigmoids(li, la)
        a, left = transition(r, rate)
        b_in = tl.sqrt(left + left * a)
        selects = needs_selects(first, row_tokens, t0, tokens, T, HAS_FIRST, HAS_STATE, WHOLE)
        if selects:
            starts = first_tokens(first, row_tokens, t0, tok, tokens, HAS_FIRST, HAS_STATE)[None, :]
            beyond = (tok >= tokens)[None, :]
            a = tl.where(starts, 0.0, tl.where(beyond, 1.0, a))
            b_in = tl.where(starts, 1.0, tl.where(beyond, 0.0, b_in))
        a = tile_to_threads(a, M, T, Q, E, PAIRED)
        v = tile_to_threads(b_in * i * xf, M, T, Q, E, PAIRED)
        if SUMMARY:
            if selects:
                tile_a, tile_v = reduce_tile(a, v, False, True, M, Q, K)
            else:
                tile_a, tile_v = reduce_tile(a, v, False, False, M, Q, K)
            # this tile's map, then that of the tiles behind it
            carry = advance(product, carry, tile_v, HAS_FIRST)
            product = through(product, tile_a, HAS_FIRST)
        else:
            if SAVE:
                store_state(saved, tch, towns, carry, Q)
            if selects:
                h_all, carry = states(a, v, carry, True, M, Q, K)
            else:
                h_all, carry = states(a, v, carry, False, M, Q, K)
            out = threads_to_tile(h_all, M, T, Q, E, PAIRED).to(y.dtype.element_ty)
            store_rows(y + row, W, tok, tokens, out, M, limit, EXACT, WHOLE)
            saved += all_rows
        t0 += to_next
        row += to_next * W

    if SUMMARY:
        at = span * B * W + column
        store_state(summary_a + at, tch, towns, product, Q)
        store_state(summary_v + at, tch, towns, carry, Q)
    elif span == segments - 1:
        store_state(final_state + column, tch, towns, carry, Q)
