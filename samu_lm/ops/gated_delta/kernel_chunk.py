"""Device code of ``ssd``: what all chunks do side by side, and the two scans of states across them.

Equations and names are those of ``chunk.py``. A chunk's tokens are the rows of its tiles; products run on the tensor
cores in the inputs' dtype with float32 sums (float32 inputs: in float32), states and decays are float32.

Legend: C tokens per chunk; K >= dk, V channels of a block of dv; n = B H; ``at`` = chunk * n + row and head.
"""

import triton
import triton.language as tl

# Device code is Triton's language, not Python's: values have no Python types.
# mypy: ignore-errors


@triton.jit
def _load_rows(source, chunk, pair, T, H, d, column, C: tl.constexpr, D: tl.constexpr):
    """Tile ``[C, D]`` of ``[B, T, H, d]`` from column ``column`` on, float32, 0 outside."""
    t, columns = chunk * C + tl.arange(0, C), column + tl.arange(0, D)
    rows = ((pair // H) * T + t).to(tl.int64) * H + pair % H
    mask = (t < T)[:, None] & (columns < d)[None, :]
    return tl.load(source + rows[:, None] * d + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(target, value, chunk, pair, T, H, d, column, C: tl.constexpr, D: tl.constexpr):
    t, columns = chunk * C + tl.arange(0, C), column + tl.arange(0, D)
    rows = ((pair // H) * T + t).to(tl.int64) * H + pair % H
    mask = (t < T)[:, None] & (columns < d)[None, :]
    tl.store(target + rows[:, None] * d + columns[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _matrix(base, at, rows, d, column, R: tl.constexpr, D: tl.constexpr):
    """Addresses and mask of a tile ``[R, D]`` of matrix ``at`` of a buffer of ``[rows, d]`` matrices."""
    r, columns = tl.arange(0, R), column + tl.arange(0, D)
    address = base + at.to(tl.int64) * rows * d + r[:, None] * d + columns[None, :]
    return address, (r < rows)[:, None] & (columns < d)[None, :]


@triton.jit
def _load_matrix(base, at, rows, d, column, R: tl.constexpr, D: tl.constexpr):
    address, mask = _matrix(base, at, rows, d, column, R, D)
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_matrix(base, value, at, rows, d, column, R: tl.constexpr, D: tl.constexpr):
    address, mask = _matrix(base, at, rows, d, column, R, D)
    tl.store(address, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def _decays(g, document, at, C: tl.constexpr):
    """D ``[C, C]``: exp(g_t - g_i) for i <= t in one document, else 0."""
    i = tl.arange(0, C)
    sums, documents = tl.load(g + at.to(tl.int64) * C + i), tl.load(document + at.to(tl.int64) * C + i)
    seen = (i[:, None] >= i[None, :]) & (documents[:, None] == documents[None, :])
    exponent = (sums[:, None] - sums[None, :]).to(tl.float32)
    return tl.where(seen, tl.exp(tl.where(seen, exponent, 0.0)), 0.0)


@triton.jit
def _inverse(a, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strictly lower part of a)^-1, by doubling the size of the diagonal blocks that are inverted."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    x = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        below = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        off = tl.where(below, a, 0.0)
        if level == 0:
            x -= off
        else:
            x -= tl.dot(tl.dot(x, off, input_precision=PRECISION), x, input_precision=PRECISION)
    return x


@triton.jit
def prepare_kernel(
    k, v, beta, g, document, from_start, inverse, w, u, T, H, dk, dv, n,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X, W = X (beta exp(g) K) and X (beta V) of one chunk, row and head."""
    at = tl.program_id(0)
    chunk, pair = at // n, at % n
    i = at.to(tl.int64) * C + tl.arange(0, C)
    b, start = tl.load(beta + i), tl.load(from_start + i)
    keys = _load_rows(k, chunk, pair, T, H, dk, 0, C, K)
    a = _dot(keys, tl.trans(keys), OPERAND, PRECISION) * _decays(g, document, at, C) * b[:, None]
    x = _inverse(a, C, LEVELS, PRECISION)
    _store_matrix(inverse, x, at, C, C, 0, C, C)
    _store_matrix(w, _dot(x, keys * (b * start)[:, None], OPERAND, PRECISION), at, C, dk, 0, C, K)
    for block in tl.static_range(BLOCKS):
        values = _load_rows(v, chunk, pair, T, H, dv, block * V, C, V)
        _store_matrix(u, _dot(x, values * b[:, None], OPERAND, PRECISION), at, C, dv, block * V, C, V)


@triton.jit
def scan_kernel(
    k, w, u, to_end, total, initial, states, final, T, H, dk, dv, n, chunks,
    HAS_INITIAL: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk, and U in place of X (beta V); one row, head and block of dv per program."""
    program = tl.program_id(0)
    pair, column = program // BLOCKS, (program % BLOCKS) * V
    state = tl.zeros([K, V], tl.float32)
    if HAS_INITIAL:
        state = _load_matrix(initial, pair, dk, dv, column, K, V)
    for chunk in range(chunks):
        at = chunk * n + pair
        _store_matrix(states, state, at, dk, dv, column, K, V)
        i = at.to(tl.int64) * C + tl.arange(0, C)
        written = _load_matrix(u, at, C, dv, column, C, V)
        written -= _dot(_load_matrix(w, at, C, dk, 0, C, K), state, OPERAND, PRECISION)
        _store_matrix(u, written, at, C, dv, column, C, V)
        seen = _load_rows(k, chunk, pair, T, H, dk, 0, C, K) * tl.load(to_end + i)[:, None]
        state = state * tl.load(total + at) + _dot(tl.trans(seen), written, OPERAND, PRECISION)
    _store_matrix(final, state, pair, dk, dv, column, K, V)


@triton.jit
def output_kernel(
    q, k, u, states, g, document, from_start, o, T, H, dk, dv, n,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O of one chunk, row, head and block of dv."""
    program = tl.program_id(0)
    at, column = program // BLOCKS, (program % BLOCKS) * V
    chunk, pair = at // n, at % n
    start = tl.load(from_start + at.to(tl.int64) * C + tl.arange(0, C))
    queries = _load_rows(q, chunk, pair, T, H, dk, 0, C, K)
    keys = _load_rows(k, chunk, pair, T, H, dk, 0, C, K)
    p = _dot(queries, tl.trans(keys), OPERAND, PRECISION) * _decays(g, document, at, C)
    out = _dot(queries, _load_matrix(states, at, dk, dv, column, K, V), OPERAND, PRECISION) * start[:, None]
    out += _dot(p, _load_matrix(u, at, C, dv, column, C, V), OPERAND, PRECISION)
    _store_rows(o, out, chunk, pair, T, H, dv, column, C, V)


@triton.jit
def local_kernel(
    q, k, grad_o, g, document, grad_u, T, H, dk, dv, n,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P^T dO: what a chunk's own outputs ask of what it wrote."""
    program = tl.program_id(0)
    at, column = program // BLOCKS, (program % BLOCKS) * V
    chunk, pair = at // n, at % n
    queries = _load_rows(q, chunk, pair, T, H, dk, 0, C, K)
    keys = _load_rows(k, chunk, pair, T, H, dk, 0, C, K)
    p = _dot(queries, tl.trans(keys), OPERAND, PRECISION) * _decays(g, document, at, C)
    grad = _load_rows(grad_o, chunk, pair, T, H, dv, column, C, V)
    _store_matrix(grad_u, _dot(tl.trans(p), grad, OPERAND, PRECISION), at, C, dv, column, C, V)


@triton.jit
def adjoint_kernel(
    q, k, w, grad_o, grad_final, from_start, to_end, total, grad_u, grad_states, grad_initial,
    T, H, dk, dv, n, chunks,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scan backwards: the gradient of the state after every chunk, and all of U's."""
    program = tl.program_id(0)
    pair, column = program // BLOCKS, (program % BLOCKS) * V
    grad = _load_matrix(grad_final, pair, dk, dv, column, K, V)
    for back in range(chunks):
        chunk = chunks - 1 - back
        at = chunk * n + pair
        _store_matrix(grad_states, grad, at, dk, dv, column, K, V)
        i = at.to(tl.int64) * C + tl.arange(0, C)
        seen = _load_rows(k, chunk, pair, T, H, dk, 0, C, K) * tl.load(to_end + i)[:, None]
        asked = _load_matrix(grad_u, at, C, dv, column, C, V) + _dot(seen, grad, OPERAND, PRECISION)
        _store_matrix(grad_u, asked, at, C, dv, column, C, V)
        queries = _load_rows(q, chunk, pair, T, H, dk, 0, C, K) * tl.load(from_start + i)[:, None]
        out = _load_rows(grad_o, chunk, pair, T, H, dv, column, C, V)
        grad = grad * tl.load(total + at) + _dot(tl.trans(queries), out, OPERAND, PRECISION)
        grad -= _dot(tl.trans(_load_matrix(w, at, C, dk, 0, C, K)), asked, OPERAND, PRECISION)
    _store_matrix(grad_initial, grad, pair, dk, dv, column, K, V)


@triton.jit
def gradients_kernel(
    q, k, v, beta, g, document, from_start, to_end, total, inverse, u, states, grad_o, grad_u, grad_states,
    grad_q, grad_k, grad_v, grad_g, grad_beta, T, H, dk, dv, n,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every input's gradient of one chunk, row and head."""
    at = tl.program_id(0)
    chunk, pair = at // n, at % n
    rows = tl.arange(0, C)
    i = at.to(tl.int64) * C + rows
    b, start, end = tl.load(beta + i), tl.load(from_start + i), tl.load(to_end + i)
    keys = _load_rows(k, chunk, pair, T, H, dk, 0, C, K)
    turned = tl.trans(_load_matrix(inverse, at, C, C, 0, C, C))
    # By the pairs of a chunk's tokens, by the state before the chunk, and by the state after it.
    by_p, by_a = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    q_state, k_state = tl.zeros([C, K], tl.float32), tl.zeros([C, K], tl.float32)
    through_end = tl.zeros([C, K], tl.float32)
    d_beta, kept = tl.zeros([C], tl.float32), 0.0
    for block in range(BLOCKS):
        column = block * V
        out = _load_rows(grad_o, chunk, pair, T, H, dv, column, C, V)
        written = _load_matrix(u, at, C, dv, column, C, V)
        d_r = _dot(turned, _load_matrix(grad_u, at, C, dv, column, C, V), OPERAND, PRECISION)
        by_p += _dot(out, tl.trans(written), OPERAND, PRECISION)
        by_a -= _dot(d_r, tl.trans(written), OPERAND, PRECISION)
        state = _load_matrix(states, at, dk, dv, column, K, V)
        q_state += _dot(out, tl.trans(state), OPERAND, PRECISION)
        k_state += _dot(d_r, tl.trans(state), OPERAND, PRECISION)
        after = _load_matrix(grad_states, at, dk, dv, column, K, V)
        through_end += _dot(written, tl.trans(after), OPERAND, PRECISION)
        kept += tl.sum(state * after)
        d_beta += tl.sum(d_r * _load_rows(v, chunk, pair, T, H, dv, column, C, V), axis=1)
        _store_rows(grad_v, d_r * b[:, None], chunk, pair, T, H, dv, column, C, V)
    queries = _load_rows(q, chunk, pair, T, H, dk, 0, C, K)
    q_state *= start[:, None]
    k_state *= start[:, None]
    key_part = tl.sum(keys * k_state, axis=1)
    d_beta -= key_part
    d_g = tl.sum(queries * q_state, axis=1) - b * key_part
    at_end = end * tl.sum(keys * through_end, axis=1)
    d_g -= at_end
    d_g += tl.where(rows == C - 1, tl.sum(at_end) + tl.load(total + at) * kept, 0.0)
    d = _decays(g, document, at, C)
    by_p *= d
    by_a = tl.where(rows[:, None] > rows[None, :], by_a * d, 0.0)
    similar = _dot(keys, tl.trans(keys), OPERAND, PRECISION) * by_a
    d_beta += tl.sum(similar, axis=1)
    moved = _dot(queries, tl.trans(keys), OPERAND, PRECISION) * by_p + similar * b[:, None]
    d_g += tl.sum(moved, axis=1) - tl.sum(moved, axis=0)
    by_a *= b[:, None]
    _store_rows(grad_q, q_state + _dot(by_p, keys, OPERAND, PRECISION), chunk, pair, T, H, dk, 0, C, K)
    d_k = through_end * end[:, None] - k_state * b[:, None]
    d_k += _dot(by_a, keys, OPERAND, PRECISION) + _dot(tl.trans(by_a), keys, OPERAND, PRECISION)
    d_k += _dot(tl.trans(by_p), queries, OPERAND, PRECISION)
    _store_rows(grad_k, d_k, chunk, pair, T, H, dk, 0, C, K)
    tl.store(grad_g + i, d_g)
    tl.store(grad_beta + i, d_beta)
