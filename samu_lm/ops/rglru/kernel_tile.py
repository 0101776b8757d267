"""RG-LRU on one tile of tokens, as device functions: gates from logits, and the recurrence inside the tile.

A tile is ``[M, T]``: M channels by T tokens, tokens along the second axis, because that is where a matrix product
``weight^T @ x^T`` puts them. In such a product a thread holds columns ``E*(q + Q*j) + e`` for its own q and all j, e
(Hopper: E = 2 neighbours, Q = 4 lanes times the warps side by side). The tokens are therefore loaded in the order
that gives every thread T/Q *consecutive* tokens: column ``E*(q + Q*j) + e`` holds token ``q*(T/Q) + E*j + e``. The scan
then runs in registers and only Q numbers per channel cross threads. Rows are renumbered as well when a tile leaves
column order (``tile_to_threads``), which keeps the compiler from moving it through shared memory. All of this is a
choice of layout: the results are right whatever layout the compiler picks.

A product for both gates has rows for both. PAIRED, row 16 j + 8 g + c belongs to channel 8 j + c and gate g: the two
rows of a thread, r and r + 8, are then the two gates of one channel, so a tile of 64 channels spreads over eight warps
with half as many numbers per thread, and no row needs a new number.

Legend: M channels, T tokens, Q thread groups along the tokens, K = T/Q tokens of a thread, a transition, v input.
"""

# ruff: noqa: RET505 (without an else, Triton compiles what follows a compile-time return as well)

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# exp2 arguments stop here, so that the product of two sigmoids' denominators stays finite: sigmoid >= 2e-19.
LARGEST_EXPONENT = tl.constexpr(62.0)
# Below this, 1 - exp(-s) is taken from its series: five terms are then exact to float32 rounding.
SERIES_BELOW = tl.constexpr(0.15)
# d sqrt(z)/dz = 1/sqrt(max(4z, 1e-6)) = min(1/sqrt(z), this) / 2.
LARGEST_RSQRT = tl.constexpr(2000.0)


@triton.jit
def column_tokens(T: tl.constexpr, Q: tl.constexpr, E: tl.constexpr):
    """Token, within its tile, that each of the T columns holds."""
    n = tl.arange(0, T)
    return ((n // E) % Q) * (T // Q) + (n // (E * Q)) * E + n % E


@triton.jit
def thread_channels(M: tl.constexpr, PAIRED: tl.constexpr):
    """Channel, within its tile, of each row after ``tile_to_threads``."""
    m = tl.arange(0, M)
    if PAIRED:
        return m
    else:
        return ((m // 8) % (M // 16)) * 16 + (m // (M // 2)) * 8 + m % 8


@triton.jit
def tile_to_threads(t, M: tl.constexpr, T: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, PAIRED: tl.constexpr):
    """``[M, T]`` in column order to ``[M, Q, K]``: channels as ``thread_channels``, tokens in their own order."""
    if PAIRED:
        t = tl.permute(tl.reshape(t, [M, T // (Q * E), Q, E]), (0, 2, 1, 3))
    else:
        t = tl.reshape(t, [M // 16, 2, 8, T // (Q * E), Q, E])
        t = tl.permute(t, (1, 0, 2, 4, 3, 5))
    return tl.reshape(t, [M, Q, T // Q])


@triton.jit
def threads_to_tile(t, M: tl.constexpr, T: tl.constexpr, Q: tl.constexpr, E: tl.constexpr, PAIRED: tl.constexpr):
    """Inverse of ``tile_to_threads``."""
    if PAIRED:
        t = tl.permute(tl.reshape(t, [M, Q, T // (Q * E), E]), (0, 2, 1, 3))
    else:
        t = tl.reshape(t, [2, M // 16, 8, Q, T // (Q * E), E])
        t = tl.permute(t, (1, 0, 2, 4, 3, 5))
    return tl.reshape(t, [M, T])


@triton.jit
def decay_rate(a_param):
    """-8 softplus(a_param), accurate for softplus far below 1 too: log1p(e) = 2 atanh(e / (2 + e))."""
    e = tl.exp2(-tl.abs(a_param) * LOG2E)
    u = e / (2.0 + e)
    u2 = u * u
    series = 1.0 + u2 * (1 / 3 + u2 * (1 / 5 + u2 * (1 / 7 + u2 * (1 / 9 + u2 * (1 / 11 + u2 * (1 / 13 + u2 / 15))))))
    return -8.0 * (tl.maximum(a_param, 0.0, propagate_nan=tl.PropagateNan.ALL) + 2.0 * u * series)


@triton.jit
def two_sigmoids(first_exponent, second_exponent):
    """1 / (1 + 2^p) and 1 / (1 + 2^q), with one reciprocal for both."""
    p = 1.0 + tl.exp2(tl.minimum(first_exponent, LARGEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL))
    q = 1.0 + tl.exp2(tl.minimum(second_exponent, LARGEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL))
    root = tl.rsqrt(p * q)
    reciprocal = root * root
    return reciprocal * q, reciprocal * p


@triton.jit
def one_sigmoid(exponent):
    """1 / (1 + 2^p)."""
    root = tl.rsqrt(1.0 + tl.exp2(tl.minimum(exponent, LARGEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)))
    return root * root


@triton.jit
def transition(r, rate):
    """a = exp(rate r) and 1 - a, each to float32 rounding however close a is to 1."""
    s = r * -rate
    series = s * (1.0 + s * (-1 / 2 + s * (1 / 6 + s * (-1 / 24 + s * (1 / 120)))))
    left = tl.where(s < SERIES_BELOW, series, 1.0 - tl.exp2(s * -LOG2E))
    return 1.0 - left, left


@triton.jit
def advance(a, v, h, CUT: tl.constexpr):
    """a h + v; under CUT a transition of exactly 0 selects v."""
    if CUT:
        return tl.where(a == 0.0, v, a * h + v)
    return a * h + v


@triton.jit
def through(a0, a1, CUT: tl.constexpr):
    """a0 a1; under CUT exactly 0 as soon as one is, even if the other is no number: nothing passes a first token."""
    if CUT:
        return tl.where((a0 == 0.0) | (a1 == 0.0), 0.0, a0 * a1)
    return a0 * a1


@triton.jit
def halves(t, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """Even and odd tokens of ``[M, Q, K]``."""
    return tl.split(tl.reshape(t, [M, Q, K // 2, 2]))


@triton.jit
def group(t, index, M: tl.constexpr, Q: tl.constexpr):
    """Column ``index`` of ``[M, Q]`` in every column: each group of threads learns what one of them has."""
    return tl.gather(t, tl.full([M, Q], index, tl.int32), 1)


@triton.jit
def across_threads(a, v, carry, REVERSE: tl.constexpr, CUT: tl.constexpr, M: tl.constexpr, Q: tl.constexpr):
    """State that reaches each of the Q groups of ``[M, Q]``, and the state that leaves the last, in every column.

    ``carry`` is ``[M, Q]`` with equal columns. All groups' maps are exchanged at once and every thread walks all of
    them: one exchange of latency, where a scan by doubling waits for several in turn.
    """
    q = tl.arange(0, Q)
    before = carry
    for step in tl.static_range(Q):
        index = Q - 1 - step if REVERSE else step
        before = tl.where((q == index)[None, :], carry, before)
        carry = advance(group(a, index, M, Q), group(v, index, M, Q), carry, CUT)
    return before, carry


@triton.jit
def reduce_tile(a, v, REVERSE: tl.constexpr, CUT: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """The whole tile ``[M, Q, K]`` as one map h -> a h + v; a and v are ``[M, Q]`` with equal columns."""
    if K == 1:
        a = tl.reshape(a, [M, Q])
        v = tl.reshape(v, [M, Q])
        start = Q - 1 if REVERSE else 0
        total_a, total_v = group(a, start, M, Q), group(v, start, M, Q)
        for step in tl.static_range(1, Q):
            index = Q - 1 - step if REVERSE else step
            next_a = group(a, index, M, Q)
            total_v = advance(next_a, group(v, index, M, Q), total_v, CUT)
            total_a = through(total_a, next_a, CUT)
        return total_a, total_v
    else:
        a0, a1 = halves(a, M, Q, K)
        v0, v1 = halves(v, M, Q, K)
        if REVERSE:
            v = advance(a0, v0, v1, CUT)
        else:
            v = advance(a1, v1, v0, CUT)
        return reduce_tile(through(a0, a1, CUT), v, REVERSE, CUT, M, Q, K // 2)


@triton.jit
def states_before(a, v, carry, CUT: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """State before every token of ``[M, Q, K]``, given that before the tile, and the state after it (``[M, Q]``)."""
    if K == 1:
        before, carry = across_threads(tl.reshape(a, [M, Q]), tl.reshape(v, [M, Q]), carry, False, CUT, M, Q)
        return tl.reshape(before, [M, Q, 1]), carry
    else:
        a0, a1 = halves(a, M, Q, K)
        v0, v1 = halves(v, M, Q, K)
        even, carry = states_before(through(a0, a1, CUT), advance(a1, v1, v0, CUT), carry, CUT, M, Q, K // 2)
        return tl.reshape(tl.join(even, advance(a0, v0, even, CUT)), [M, Q, K]), carry


@triton.jit
def states(a, v, carry, CUT: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """State after every token of ``[M, Q, K]``, and after the tile."""
    if K == 1:
        before, carry = states_before(a, v, carry, CUT, M, Q, K)
        return advance(a, v, before, CUT), carry
    else:
        a0, a1 = halves(a, M, Q, K)
        v0, v1 = halves(v, M, Q, K)
        before, carry = states_before(through(a0, a1, CUT), advance(a1, v1, v0, CUT), carry, CUT, M, Q, K // 2)
        even = advance(a0, v0, before, CUT)
        return tl.reshape(tl.join(even, advance(a1, v1, even, CUT)), [M, Q, K]), carry


@triton.jit
def both_before(a, v, u, h, g, CUT: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """What reaches every token of ``[M, Q, K]`` from before and from behind; the two share products of transitions.

    Forward h -> a h + v from ``h`` before the tile, backward g -> a g + u from ``g`` behind it, both ``[M, Q]``.
    Also returns the adjoint before the tile.
    """
    if K == 1:
        a = tl.reshape(a, [M, Q])
        before, h = across_threads(a, tl.reshape(v, [M, Q]), h, False, CUT, M, Q)
        behind, g = across_threads(a, tl.reshape(u, [M, Q]), g, True, CUT, M, Q)
        return tl.reshape(before, [M, Q, 1]), tl.reshape(behind, [M, Q, 1]), g
    else:
        a0, a1 = halves(a, M, Q, K)
        v0, v1 = halves(v, M, Q, K)
        u0, u1 = halves(u, M, Q, K)
        before, behind, g = both_before(
            through(a0, a1, CUT), advance(a1, v1, v0, CUT), advance(a0, u0, u1, CUT), h, g, CUT, M, Q, K // 2
        )
        before = tl.reshape(tl.join(before, advance(a0, v0, before, CUT)), [M, Q, K])
        behind = tl.reshape(tl.join(advance(a1, u1, behind, CUT), behind), [M, Q, K])
        return before, behind, g


@triton.jit
def moved(a, h, CUT: tl.constexpr):
    """a h; under CUT a transition of exactly 0 gives 0 whatever h is."""
    if CUT:
        return tl.where(a == 0.0, 0.0, a * h)
    return a * h


@triton.jit
def moved_states_and_adjoints(a, v, dy, u, h, g, CUT: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """Both recurrences of a tile: h_t = a_t h_{t-1} + v_t, and backwards g_t = dy_t + a_{t+1} g_{t+1}.

    Args:
        a, v, dy, u: ``[M, Q, K]``, K at least 2; u is a dy, 0 where a is.
        h: ``[M, Q]`` with equal columns, the state before the tile.
        g: as h, what reaches its last token from behind.

    Returns:
        a_t h_{t-1} and g_t of every token, and a_t g_t of the first.
    """
    a0, a1 = halves(a, M, Q, K)
    v0, v1 = halves(v, M, Q, K)
    dy0, dy1 = halves(dy, M, Q, K)
    u0, u1 = halves(u, M, Q, K)
    before, behind, g = both_before(
        through(a0, a1, CUT), advance(a1, v1, v0, CUT), advance(a0, u0, u1, CUT), h, g, CUT, M, Q, K // 2
    )
    even = moved(a0, before, CUT)
    odd = moved(a1, even + v0, CUT)
    g1 = dy1 + behind
    g0 = dy0 + moved(a1, g1, CUT)
    return tl.reshape(tl.join(even, odd), [M, Q, K]), tl.reshape(tl.join(g0, g1), [M, Q, K]), g


@triton.jit
def fold_pieces(carry, a_ptr, v_ptr, start, step, count, B, W, column, tch, mask, CUT: tl.constexpr, J: tl.constexpr):
    """Carries ``[M]`` through ``count`` pieces' maps ``[pieces, B, W]``, in order start, start + step, ...

    ``start`` is int64. J maps are loaded at a time, so that their latencies overlap.
    """
    for at in range(0, count, J):
        for j in tl.static_range(J):
            inside = mask & (at + j < count)
            where = (start + step * (at + j)) * B * W + column
            a = tl.load(a_ptr + where + tch, mask=inside, other=1.0)
            v = tl.load(v_ptr + where + tch, mask=inside, other=0.0)
            carry = advance(a, v, carry, CUT)
    return carry


@triton.jit
def store_state(target, tch, mask, state, Q: tl.constexpr):
    """Writes ``[M, Q]`` of equal columns as ``[M]``, in the order of ``tch``."""
    q = tl.arange(0, Q)
    tl.store(target + tch[:, None] + q[None, :] * 0, state, mask=mask[:, None] & (q == 0)[None, :])
