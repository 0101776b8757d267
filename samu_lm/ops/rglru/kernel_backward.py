"""RG-LRU backward kernels: the adjoint in reverse, gates recomputed from x (see docs/kernels-rglru.md).

    g_t = dy_t + a_{t+1} g_{t+1}                          (cut where t+1 is a first token)
    d log a_t = g_t a_t h_{t-1} - g_t i_t x_t a_t^2 min(1/sqrt(1 - a_t^2), 2000)

``summary_kernel`` reduces a piece of a segment to one map c -> A c + G per channel, where c is the gradient that
reaches the piece from behind, and visits only what can reach the segment's start. ``gradient_kernel`` folds the maps
between its segment and the next first token, walks its tiles backwards, replays the states of a tile from the state
saved before it, and writes every gradient: those of the weights as sums kept in registers where one program owns a
whole gate block, else through the logits' gradients in memory and ``projection_kernel`` (kernel_projection.py).

Legend as in kernel_forward.py; P programs that share a channel block each keep their own float32 partial sums, which
``reduce_kernel`` (kernel_projection.py) adds in a fixed order.
"""

import triton
import triton.language as tl

from samu_lm.ops.rglru.kernel_forward import (
    apart,
    first_tokens,
    load_both,
    load_rows,
    load_slice,
    load_weight,
    locate,
    needs_selects,
    pick_both,
    pick_half,
    pick_rows,
    project,
    store_rows,
    tokens_to_reset,
)
from samu_lm.ops.rglru.kernel_tile import (
    LARGEST_RSQRT,
    LOG2E,
    advance,
    column_tokens,
    decay_rate,
    fold_pieces,
    moved_states_and_adjoints,
    one_sigmoid,
    reduce_tile,
    store_state,
    thread_channels,
    threads_to_tile,
    through,
    tile_to_threads,
    transition,
    two_sigmoids,
)


@triton.jit(do_not_specialize=["B", "L", "tiles_per_piece", "pieces_per_segment", "segments"])
def summary_kernel(
    x, a_logits, a_weight, a_bias, a_param, first, grad_y, summary_a, summary_g,
    B, L, W, H, tiles_per_piece, pieces_per_segment, segments,
    FROM_LOGITS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr, w: tl.constexpr,
    slices: tl.constexpr, M: tl.constexpr, T: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, K1: tl.constexpr,
    K2: tl.constexpr, PICK: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr, PAIRED: tl.constexpr,
    RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    slice_, h, b, span = locate(tl.program_id(0), slices, H, B)
    piece = span + pieces_per_segment
    block = h * w
    c0 = slice_ * M
    limit = tl.minimum(w - c0, W - block - c0)
    own = tl.arange(0, M) < limit
    tch = thread_channels(M, PAIRED)
    tok = column_tokens(T, Q, E)
    K: tl.constexpr = T // Q
    TWO: tl.constexpr = K2 > 0
    EXACT: tl.constexpr = not FROM_LOGITS and w % M == 0 and w == K1 + K2

    rate = decay_rate(tl.load(a_param + block + c0 + tl.arange(0, M), mask=own, other=0.0).to(tl.float32))[:, None]
    if not FROM_LOGITS:
        wa = a_weight + h * w * w
        wa1 = tl.trans(load_weight(wa, 0, K1, c0, M, w, OPERAND))
        wa2 = wa1
        if TWO:
            wa2 = tl.trans(load_weight(wa, K1, K2, c0, M, w, OPERAND))
        bias_a = tl.load(a_bias + block + c0 + tl.arange(0, M), mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
    if PICK:
        pick = pick_rows(0, M, 0, M, OPERAND)

    product = tl.full([M, Q], 1.0, tl.float32)
    carry = tl.zeros([M, Q], tl.float32)
    # this piece's own tokens, up to its first first token; none if the segment has one before it
    piece_tokens = tiles_per_piece * T
    begin = piece * piece_tokens
    end = tl.minimum(begin + piece_tokens, L)
    count = (end - begin).to(tl.int32)
    tiles = (count + T - 1) // T
    if HAS_FIRST:
        ahead = ((piece % pieces_per_segment) * piece_tokens).to(tl.int32)
        if tokens_to_reset(first, b * L + begin - ahead, ahead, True, 1024) < ahead:
            tiles = 0
        else:
            nearest = tokens_to_reset(first, b * L + begin, count, False, 1024)
            if nearest < count:
                tiles = nearest // T + 1
    t0 = begin.to(tl.int32)
    row = (b * L + t0) * W + block
    for _ in tl.range(0, tiles, num_stages=STAGES):
        tokens = end.to(tl.int32) - t0
        row_tokens = b * L + t0
        grad_row = grad_y + c0 + row
        dy = tl.trans(load_rows(grad_row, W, tok, tokens, 0, M, limit, EXACT, WHOLE))
        if PICK:
            dy = tl.dot(pick, dy.to(OPERAND), input_precision="ieee")
        else:
            dy = dy.to(tl.float32)
        if FROM_LOGITS:
            logits_row = a_logits + c0 + row
            la = tl.trans(load_rows(logits_row, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(tl.float32) * -LOG2E
        else:
            x_row = x + row
            x1 = tl.trans(load_rows(x_row, W, tok, tokens, 0, K1, w, EXACT, WHOLE).to(OPERAND))
            x2 = x1
            if TWO:
                x2 = tl.trans(load_rows(x_row, W, tok, tokens, K1, K2, w, EXACT, WHOLE).to(OPERAND))
            la = project(wa1, x1, wa2, x2, TWO) * -LOG2E + bias_a
        a, _ = transition(one_sigmoid(la), rate)
        u = a * dy
        selects = needs_selects(first, row_tokens, t0, tokens, T, HAS_FIRST, HAS_STATE, WHOLE)
        if selects:
            starts = first_tokens(first, row_tokens, t0, tok, tokens, HAS_FIRST, HAS_STATE)[None, :]
            a = tl.where(starts, 0.0, tl.where((tok >= tokens)[None, :], 1.0, a))
            u = tl.where(starts, 0.0, u)
        a = tile_to_threads(a, M, T, Q, E, PAIRED)
        u = tile_to_threads(u, M, T, Q, E, PAIRED)
        if selects:
            tile_a, tile_u = reduce_tile(a, u, True, True, M, Q, K)
        else:
            tile_a, tile_u = reduce_tile(a, u, True, False, M, Q, K)
        # this tile's map, then that of the tiles before it
        carry = advance(product, carry, tile_u, HAS_FIRST)
        product = through(product, tile_a, HAS_FIRST)
        t0 += T
        row += T * W

    at = piece * B * W + b * W + block + c0
    store_state(summary_a + at, tch, tch < limit, product, Q)
    store_state(summary_g + at, tch, tch < limit, carry, Q)


@triton.jit(do_not_specialize=["B", "L", "tiles_per_piece", "pieces_per_segment", "segments"])
def gradient_kernel(
    x, input_logits, a_logits, input_weight, input_bias, a_weight, a_bias, a_param, first, states, grad_y, grad_final,
    summary_a, summary_g, grad_x, grad_input_logits, grad_a_logits, partial_weights, partial_vectors, grad_initial,
    B, L, W, H, tiles_per_piece, pieces_per_segment, segments,
    FROM_LOGITS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STATE: tl.constexpr, HAS_GRAD_FINAL: tl.constexpr,
    FUSED: tl.constexpr, w: tl.constexpr,
    slices: tl.constexpr, M: tl.constexpr, T: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, K1: tl.constexpr,
    K2: tl.constexpr, J: tl.constexpr, PICK: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not (FUSED and PAIRED), "the weights' gradients want the gates side by side")
    slice_, h, b, segment = locate(tl.program_id(0), slices, H, B)
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
        w1 = load_both(wi, wa, 0, K1, c0, M, w, PAIRED, OPERAND)
        w2 = w1
        if TWO:
            w2 = load_both(wi, wa, K1, K2, c0, M, w, PAIRED, OPERAND)
        bias_i = tl.load(input_bias + block + c0 + ch, mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
        bias_a = tl.load(a_bias + block + c0 + ch, mask=own, other=0.0).to(tl.float32)[:, None] * -LOG2E
        if PICK:
            pick1, pick2 = pick_both(K1, K2, c0, M, PAIRED, OPERAND)
    if PICK:
        if PAIRED:
            pick = pick_half(1, 0, M, 0, M, OPERAND)
        else:
            pick = pick_rows(0, M, 0, M, OPERAND)
    if FUSED:
        sum_w = tl.zeros([K1, 2 * M], tl.float32)
    sum_bi = tl.zeros([M, Q], tl.float32)
    sum_ba = tl.zeros([M, Q], tl.float32)
    sum_rate = tl.zeros([M, Q], tl.float32)

    column = b * W + block + c0
    carry = tl.zeros([M], tl.float32)
    if HAS_GRAD_FINAL:
        carry = tl.load(grad_final + column + tch, mask=towns, other=0.0).to(tl.float32)
    segment_tokens = pieces_per_segment * tiles_per_piece * T
    begin = segment * segment_tokens
    end = tl.minimum(begin + segment_tokens, L)
    # what reaches the segment from behind: fold the pieces up to the next first token, or to the row's end
    last_piece = (L - 1) // (tiles_per_piece * T) + segment * 0
    if HAS_FIRST:
        rest = (L - end).to(tl.int32)
        nearest = tokens_to_reset(first, b * L + end, rest, False, 4096)
        if nearest < rest:
            last_piece = (end + nearest) // (tiles_per_piece * T)
    pieces = (last_piece + 1 - (segment + 1) * pieces_per_segment).to(tl.int32)
    carry = fold_pieces(carry, summary_a, summary_g, last_piece, -1, pieces, B, W, column, tch, towns, HAS_FIRST, J)

    carry = tl.broadcast_to(carry[:, None], [M, Q])
    tiles = ((end - begin + T - 1) // T).to(tl.int32)
    t0 = (begin + (tiles - 1) * T).to(tl.int32)
    row = (b * L + t0) * W
    x += block
    own_block = block + c0
    all_rows = B.to(tl.int64) * W
    saved = states + (t0 // T) * all_rows + column
    for _ in tl.range(0, tiles, num_stages=STAGES):
        tokens = end.to(tl.int32) - t0
        row_tokens = b * L + t0
        x_row = x + row
        grad_row = grad_y + own_block + row
        # here, so that one wait serves all loads
        state = tl.load(saved + tch, mask=towns, other=0.0)
        if FROM_LOGITS:
            xf = tl.trans(load_rows(x_row + c0, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(tl.float32)
            li = (
                tl.trans(load_rows(input_logits + own_block + row, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(
                    tl.float32
                )
                * -LOG2E
            )
            la = (
                tl.trans(load_rows(a_logits + own_block + row, W, tok, tokens, 0, M, limit, EXACT, WHOLE)).to(
                    tl.float32
                )
                * -LOG2E
            )
        else:
            x1 = tl.trans(load_rows(x_row, W, tok, tokens, 0, K1, w, EXACT, WHOLE).to(OPERAND))
            x2 = x1
            if TWO:
                x2 = tl.trans(load_rows(x_row, W, tok, tokens, K1, K2, w, EXACT, WHOLE).to(OPERAND))
            li, la = apart(project(tl.trans(w1), x1, tl.trans(w2), x2, TWO), M, T, PAIRED)
            li = li * -LOG2E + bias_i
            la = la * -LOG2E + bias_a
            if PICK:
                xf = project(pick1, x1, pick2, x2, TWO)
            else:
                xf = load_slice(x_row + c0, W, tok, tokens, M, T, limit, RUN, EXACT, WHOLE).to(tl.float32)

        i, r = two_sigmoids(li, la)
        a, left = transition(r, rate)
        z = left + left * a
        inverse = tl.rsqrt(tl.maximum(z, 1e-30))
        b_in = z * inverse
        # d b / d log a = -a^2 / b, its reciprocal root clipped; 0 where b is not a function of a
        slope = -a * a * tl.minimum(inverse, LARGEST_RSQRT)
        if PICK:
            dy = tl.trans(load_rows(grad_row, W, tok, tokens, 0, M, limit, EXACT, WHOLE))
        else:
            dy = load_slice(grad_row, W, tok, tokens, M, T, limit, RUN, EXACT, WHOLE)
        if PICK and PAIRED:
            xf, dy = apart(tl.dot(pick, dy.to(OPERAND), xf, input_precision="ieee"), M, T, PAIRED)
        elif PICK:
            dy = tl.dot(tl.trans(pick), dy.to(OPERAND), input_precision="ieee")
        else:
            dy = dy.to(tl.float32)
        u = a * dy
        selects = needs_selects(first, row_tokens, t0, tokens, T, HAS_FIRST, HAS_STATE, WHOLE)
        if selects:
            starts = first_tokens(first, row_tokens, t0, tok, tokens, HAS_FIRST, HAS_STATE)[None, :]
            beyond = (tok >= tokens)[None, :]
            a = tl.where(starts, 0.0, tl.where(beyond, 1.0, a))
            b_in = tl.where(starts, 1.0, tl.where(beyond, 0.0, b_in))
            slope = tl.where(starts | beyond, 0.0, slope)
            u = tl.where(starts, 0.0, u)
            r = tl.where(beyond, 0.0, r)
        gated = xf * i
        bi = b_in * i
        v = b_in * gated
        by_multiplier = gated * slope
        by_gate = v - v * i
        state = tl.broadcast_to(state[:, None], [M, Q])
        a = tile_to_threads(a, M, T, Q, E, PAIRED)
        v = tile_to_threads(v, M, T, Q, E, PAIRED)
        dy = tile_to_threads(dy, M, T, Q, E, PAIRED)
        u = tile_to_threads(u, M, T, Q, E, PAIRED)
        if selects:
            by_state, g, carry = moved_states_and_adjoints(a, v, dy, u, state, carry, True, M, Q, K)
        else:
            by_state, g, carry = moved_states_and_adjoints(a, v, dy, u, state, carry, False, M, Q, K)
        g = threads_to_tile(g, M, T, Q, E, PAIRED)
        grad_r = g * (threads_to_tile(by_state, M, T, Q, E, PAIRED) + by_multiplier) * r
        grad_la = grad_r * (rate - rate * r)
        grad_li = g * by_gate
        grad_u = g * bi

        # a thread sums its own tokens; threads meet once, at the end
        sum_rate += tl.sum(tile_to_threads(grad_r, M, T, Q, E, PAIRED), 2)
        sum_bi += tl.sum(tile_to_threads(grad_li, M, T, Q, E, PAIRED), 2)
        sum_ba += tl.sum(tile_to_threads(grad_la, M, T, Q, E, PAIRED), 2)
        if FUSED:
            both = tl.join(grad_li.to(OPERAND), grad_la.to(OPERAND))
            both = tl.reshape(tl.permute(both, (2, 0, 1)), [2 * M, T])
            grad_u = tl.dot(w1, both, grad_u, input_precision="ieee")
            sum_w = tl.dot(x1, tl.trans(both), sum_w, input_precision="ieee")
        else:
            out_type = grad_input_logits.dtype.element_ty
            if FROM_LOGITS:
                store_rows(
                    grad_input_logits + own_block + row, W, tok, tokens, grad_li.to(out_type), M, limit, EXACT, WHOLE
                )
                store_rows(
                    grad_a_logits + own_block + row, W, tok, tokens, grad_la.to(out_type), M, limit, EXACT, WHOLE
                )
            else:
                logits_row = grad_input_logits + (own_block + block) + 2 * row
                store_rows(logits_row, 2 * W, tok, tokens, grad_li.to(out_type), M, limit, EXACT, WHOLE)
                store_rows(logits_row + w, 2 * W, tok, tokens, grad_la.to(out_type), M, limit, EXACT, WHOLE)
        store_rows(grad_x + own_block + row, W, tok, tokens, grad_u.to(grad_x.dtype.element_ty), M, limit, EXACT, WHOLE)
        t0 -= T
        row -= T * W
        saved -= all_rows

    if segment == 0:
        store_state(grad_initial + column, tch, towns, carry, Q)
    # d rate / d a_param = -8 sigmoid(a_param)
    param = tl.load(a_param + block + c0 + tch, mask=towns, other=0.0).to(tl.float32)
    part = segment * B + b
    at = part * (3 * W) + block + c0 + tch
    tl.store(partial_vectors + at, tl.sum(sum_bi, 1), mask=towns)
    tl.store(partial_vectors + at + W, tl.sum(sum_ba, 1), mask=towns)
    tl.store(partial_vectors + at + 2 * W, tl.sum(sum_rate, 1) * -8.0 * one_sigmoid(param * -LOG2E), mask=towns)
    if FUSED:
        k, n = tl.arange(0, K1), tl.arange(0, 2 * M)
        inside = (k < w)[:, None] & (n % M < limit)[None, :]
        at_w = (part * (2 * H) + h + (n // M) * H)[None, :] * (w * w) + k[:, None] * w + (n % M)[None, :]
        tl.store(partial_weights + at_w, sum_w, mask=inside)
