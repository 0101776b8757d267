"""Kernels of one decoded token that read matrices: a product with a few vectors, its neighbours in the block fused in.

Letters: B rows, N outputs, K inputs; matrices ``[N, K]`` bfloat16, sums float32. A program owns a few outputs and all
of K, so that no sum crosses programs. Two bfloat16 neighbours are read as one word, which takes one instruction each
to widen; K is read in ``WHOLE`` pieces of ``TILE`` words and a shorter one.

RMSNorm is split: who completes the residual stream x also writes ``scaled = x (1 + scale)``, which the next matrix
reads, and the sum of squares of its own part of x; the matrix's outputs are then multiplied by the norm's factor.

With ``OVERLAP`` a kernel starts while the one before it still runs: it asks for its matrix, which depends on nothing,
and only then waits. All of a program's rows of the matrix are on their way before the wait, so that memory is busy
while vectors travel from kernel to kernel. Nothing that another kernel of the same token writes is read before it.

Vectors are read as matrices of equal rows, so that they come in the registers where they are multiplied: a detour
through shared memory would cost barriers between the wait and the product.
"""

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors

import triton
import triton.language as tl


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
def gelu_tanh(x):
    """GELU in its tanh form: ``x (1 + tanh z) / 2 = x / (1 + exp(-2 z))``."""
    z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp(-2 * z))


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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < N
    rows = tl.minimum(rows, N - 1)
    gated_rows = _matrix(gated_matrix, rows, K, TILE, WHOLE, REST)
    plain_rows = _matrix(plain_matrix, rows, K, TILE, WHOLE, REST)
    gated_shift = tl.load(gated_bias + rows).to(tl.float32)
    plain_shift = tl.load(plain_bias + rows).to(tl.float32)
    wait_for_last(OVERLAP)
    for b in range(B):
        vector = _vector(scaled + b * K, ROWS, K, TILE, WHOLE, REST)
        factor = _norm_factor(squares + b * PARTS, ROWS, K, PARTS, EPS)
        first = gelu_tanh(_product(gated_rows, vector, WHOLE, REST) * factor + gated_shift)
        second = _product(plain_rows, vector, WHOLE, REST) * factor + plain_shift
        if MULTIPLY:
            tl.store(gated + b * N + rows, (first * second).to(gated.dtype.element_ty), mask=mask)
        else:
            tl.store(gated + b * N + rows, first.to(gated.dtype.element_ty), mask=mask)
            slot = (tl.load(seen + b) % TAPS).to(tl.int32)
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
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    mask = rows < N
    rows = tl.minimum(rows, N - 1)
    pieces = _matrix(matrix, rows, K, TILE, WHOLE, REST)
    shift = tl.load(bias + rows).to(tl.float32)
    gain = 1 + tl.load(scale + rows).to(tl.float32)
    wait_for_last(OVERLAP)
    for b in range(B):
        before = tl.load(x + b * N + rows)
        total = _product(pieces, _vector(v + b * K, ROWS, K, TILE, WHOLE, REST), WHOLE, REST)
        after = before + (total + shift)
        tl.store(x + b * N + rows, after, mask=mask)
        tl.store(scaled + b * N + rows, (after * gain).to(scaled.dtype.element_ty), mask=mask)
        tl.store(squares + b * PARTS + pid, tl.sum(tl.where(mask, after * after, 0.0), axis=0))


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
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    mask = rows < N
    pieces = _matrix(embedding, tl.minimum(rows, N - 1), K, TILE, WHOLE, REST)
    wait_for_last(OVERLAP)
    for b in range(B):
        vector = _vector(scaled + b * K, ROWS, K, TILE, WHOLE, REST)
        factor = _norm_factor(squares + b * PARTS, ROWS, K, PARTS, EPS)
        values = _product(pieces, vector, WHOLE, REST) * factor
        tl.store(logits + b * N + rows, values, mask=mask)
        values = tl.where(mask, values, float("-inf"))
        largest = tl.max(values, axis=0)
        tl.store(best + b * PROGRAMS + pid, largest)
        tl.store(best_id + b * PROGRAMS + pid, tl.min(tl.where(values == largest, rows, N), axis=0))
