"""Kernels of one decoded token that read matrices: a product with a few vectors, its neighbours in the block fused in.

Letters: B rows, N outputs, K inputs; matrices ``[N, K]`` bfloat16, sums float32. A program owns a few outputs and all
of K, so that no sum crosses programs. Two bfloat16 neighbours are read as one word, which takes one instruction each
to widen; K is read in ``WHOLE`` pieces of ``TILE`` words and a shorter one.

RMSNorm is split: who completes the residual stream x also writes ``scaled = x (1 + scale)``, which the next matrix
reads, and the sum of squares of its own part of x; the matrix's outputs are then multiplied by the norm's factor.

With ``OVERLAP`` a kernel starts while the one before it still runs: it asks for its matrix, which depends on nothing,
and only then waits. All of a program's rows of the matrix are on their way before the wait, so that memory is busy
while vectors travel from kernel to kernel. Nothing that another kernel of the same token writes is read before it.

A program's outputs may come in ``GROUPS`` of ``ROWS``, which share the vector's registers.

Vectors are read as matrices of equal rows, so that they come in the registers where they are multiplied: a detour
through shared memory would cost barriers between the wait and the product.
"""

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl

from samu_lm.ops.common.elementary import gelu_share


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next kernel may start once every program of this one has come here."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Returns once the kernel before this one, and so every earlier one, has ended and its writes are seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def group_rows(g, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Outputs of group g of this program."""
    return (tl.program_id(0) * GROUPS + g) * ROWS + tl.arange(0, ROWS)


@triton.jit
def _matrix(matrix, rows, K: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, REST: tl.constexpr):
    """Pieces ``[ROWS, TILE]`` of some rows, in words."""
    row = matrix.to(tl.pointer_type(tl.int32)) + rows.to(tl.int64)[:, None] * (K // 2)
    pieces = ()
    for i in tl.static_range(WHOLE):
        k = i * TILE + tl.arange(0, TILE)
        pieces = pieces + (tl.load(row + k[None, :], eviction_policy="evict_first"),)
    if REST > 0:
        k = WHOLE * TILE + tl.arange(0, REST)
        if WHOLE * TILE + REST == K // 2:
            pieces = pieces + (tl.load(row + k[None, :], eviction_policy="evict_first"),)
        else:
            pieces = pieces + (tl.load(row + k[None, :], mask=(k < K // 2)[None, :], other=0),)
    return pieces


@triton.jit
def _even(word):
    """The first of two bfloat16 in a word, float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _odd(word):
    """The second."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _piece(x, k, K: tl.constexpr):
    """Even and odd entries of a vector at words k, float32; 0 beyond its end."""
    mask = k < K // 2
    if x.dtype.element_ty == tl.bfloat16:
        word = tl.load(x.to(tl.pointer_type(tl.int32)) + k, mask=mask, other=0)
        return _even(word), _odd(word)
    even = tl.load(x + 2 * k, mask=mask, other=0.0)
    return even.to(tl.float32), tl.load(x + 2 * k + 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _vector(x, ROWS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, REST: tl.constexpr):
    """The matching pieces of a vector, once for each row."""
    pieces = ()
    for i in tl.static_range(WHOLE):
        k = tl.broadcast_to((i * TILE + tl.arange(0, TILE))[None, :], [ROWS, TILE])
        pieces = pieces + (_piece(x, k, K),)
    if REST > 0:
        k = tl.broadcast_to((WHOLE * TILE + tl.arange(0, REST))[None, :], [ROWS, REST])
        pieces = pieces + (_piece(x, k, K),)
    return pieces


@triton.jit
def _product(matrix, vector, WHOLE: tl.constexpr, REST: tl.constexpr):
    """Sums ``[ROWS]``."""
    products = _even(matrix[0]) * vector[0][0] + _odd(matrix[0]) * vector[0][1]
    for i in tl.static_range(1, WHOLE):
        products += _even(matrix[i]) * vector[i][0]
        products += _odd(matrix[i]) * vector[i][1]
    total = tl.sum(products, axis=1)
    if REST > 0:
        total += tl.sum(_even(matrix[WHOLE]) * vector[WHOLE][0] + _odd(matrix[WHOLE]) * vector[WHOLE][1], axis=1)
    return total


@triton.jit
def _norm_factor(squares, ROWS: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, EPS: tl.constexpr):
    """1 / the root mean square of x, once for each row, from PARTS sums of squares."""
    total = tl.zeros([ROWS, 128], tl.float32)
    for i in tl.static_range(0, PARTS, 128):
        part = tl.broadcast_to((i + tl.arange(0, 128))[None, :], [ROWS, 128])
        total += tl.load(squares + part, mask=part < PARTS, other=0.0)
    return tl.rsqrt(tl.sum(total, axis=1) / K + EPS)


@triton.jit
def _groups(matrix, N, K: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
            WHOLE: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Pieces of the program's rows, by group; rows beyond the last are the last again."""
    groups = ()
    for g in tl.static_range(GROUPS):
        rows = tl.minimum(group_rows(g, ROWS, GROUPS), N - 1)
        groups = groups + (_matrix(matrix, rows, K, TILE, WHOLE, REST),)
    return groups


@triton.jit
def _entries(values, N, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """A vector's entries at the program's rows, float32, by group."""
    groups = ()
    for g in tl.static_range(GROUPS):
        groups = groups + (tl.load(values + tl.minimum(group_rows(g, ROWS, GROUPS), N - 1)).to(tl.float32),)
    return groups


@triton.jit
def paired_kernel(
    scaled,
    squares,
    gated_matrix,
    gated_bias,
    plain_matrix,
    plain_bias,
    gated,
    plain,
    seen,
    B: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    MULTIPLY: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Two matrices on RMSNorm(x), gelu_tanh on the first's outputs.

    scaled ``[B, K]``, squares ``[B, PARTS]``; gated ``[B, N]``. With MULTIPLY (the MLP) gated is the product of both.
    Without, the second's outputs go to the ring of convolution inputs, plain ``[B, TAPS, N]``, at the row's number of
    tokens seen modulo TAPS.
    """
    let_next_start(OVERLAP)
    gated_rows = _groups(gated_matrix, N, K, ROWS, GROUPS, TILE, WHOLE, REST)
    plain_rows = _groups(plain_matrix, N, K, ROWS, GROUPS, TILE, WHOLE, REST)
    gated_shift = _entries(gated_bias, N, ROWS, GROUPS)
    plain_shift = _entries(plain_bias, N, ROWS, GROUPS)
    wait_for_last(OVERLAP)
    for b in range(B):
        vector = _vector(scaled + b * K, ROWS, K, TILE, WHOLE, REST)
        factor = _norm_factor(squares + b * PARTS, ROWS, K, PARTS, EPS)
        slot = (tl.load(seen + b) % TAPS).to(tl.int32)
        for g in tl.static_range(GROUPS):
            rows = group_rows(g, ROWS, GROUPS)
            mask = rows < N
            first = _product(gated_rows[g], vector, WHOLE, REST) * factor + gated_shift[g]
            first *= gelu_share(first)
            second = _product(plain_rows[g], vector, WHOLE, REST) * factor + plain_shift[g]
            if MULTIPLY:
                tl.store(gated + b * N + rows, (first * second).to(gated.dtype.element_ty), mask=mask)
            else:
                tl.store(gated + b * N + rows, first.to(gated.dtype.element_ty), mask=mask)
                tl.store(plain + (b * TAPS + slot) * N + rows, second, mask=mask)


@triton.jit
def residual_kernel(
    v,
    matrix,
    bias,
    scale,
    x,
    scaled,
    squares,
    B: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds ``matrix @ v + bias`` to the residual stream x ``[B, N]`` in place; v ``[B, K]``.

    Writes what the next norm needs: scaled ``[B, N]``, squares ``[B, PARTS]``, a sum per program.
    """
    let_next_start(OVERLAP)
    pieces = _groups(matrix, N, K, ROWS, GROUPS, TILE, WHOLE, REST)
    shift = _entries(bias, N, ROWS, GROUPS)
    gain = _entries(scale, N, ROWS, GROUPS)
    wait_for_last(OVERLAP)
    for b in range(B):
        vector = _vector(v + b * K, ROWS, K, TILE, WHOLE, REST)
        before = _entries(x + b * N, N, ROWS, GROUPS)
        total = tl.zeros([ROWS], tl.float32)
        for g in tl.static_range(GROUPS):
            rows = group_rows(g, ROWS, GROUPS)
            mask = rows < N
            after = before[g] + (_product(pieces[g], vector, WHOLE, REST) + shift[g])
            tl.store(x + b * N + rows, after, mask=mask)
            tl.store(scaled + b * N + rows, (after * (1 + gain[g])).to(scaled.dtype.element_ty), mask=mask)
            total += tl.where(mask, after * after, 0.0)
        tl.store(squares + b * PARTS + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def logits_kernel(
    scaled,
    squares,
    embedding,
    logits,
    best,
    best_id,
    B: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Logits ``[B, N]`` of RMSNorm(x); each program's largest and its id, ``[B, PROGRAMS]``."""
    let_next_start(OVERLAP)
    pieces = _groups(embedding, N, K, ROWS, GROUPS, TILE, WHOLE, REST)
    wait_for_last(OVERLAP)
    for b in range(B):
        vector = _vector(scaled + b * K, ROWS, K, TILE, WHOLE, REST)
        factor = _norm_factor(squares + b * PARTS, ROWS, K, PARTS, EPS)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        largest_id = tl.full([ROWS], N, tl.int32)
        for g in tl.static_range(GROUPS):
            rows = group_rows(g, ROWS, GROUPS)
            values = _product(pieces[g], vector, WHOLE, REST) * factor
            tl.store(logits + b * N + rows, values, mask=rows < N)
            better = (values > largest) & (rows < N)
            largest = tl.where(better, values, largest)
            largest_id = tl.where(better, rows, largest_id)
        most = tl.max(largest, axis=0)
        at = b * PROGRAMS + tl.program_id(0)
        tl.store(best + at, most)
        tl.store(best_id + at, tl.min(tl.where(largest == most, largest_id, N), axis=0))
