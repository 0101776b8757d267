"""Kernels of the causal depthwise convolution's backward pass: gradients, and the sum of the parameters' partial ones.

Shapes as in ``kernel_conv``. First tokens are rare: a piece of STEP tokens without one runs without flags and selects.
(In the forward pass they cost nothing.)
"""

import triton
import triton.language as tl

from samu_lm.ops.causal_conv1d.kernel_pieces import finish, pass_pieces, pieces_with_first
from samu_lm.ops.causal_conv1d.kernel_window import is_first, load_taps, load_token, push, window_before
from samu_lm.ops.common.reduce import column_sums

# Device code is Triton's language, not Python's: tuples grow by +, and values have no Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors


@triton.jit(do_not_specialize=["length", "row_chunks"])
def conv_gradients_kernel(
    x,
    weight,
    first,
    initial_state,
    grad_y,
    grad_final_state,
    grad_x,
    grad_initial_state,
    partials,
    length,
    row_chunks,
    stride_b,
    W: tl.constexpr,
    STRIDE_T: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNEL_BLOCKS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """grad_x, the initial state's gradient, and per chunk the sums of the taps' and the bias's gradients.

    partials ``[B * N, K + 1, W]``: row k for the tap k tokens back, the last for the bias. Gradients of inputs are
    finished K - 1 tokens after the input, so a chunk reads K - 1 tokens of grad_y beyond its end.
    """
    REACH: tl.constexpr = TAPS - 1
    pid = tl.program_id(0)
    chunk = pid // CHANNEL_BLOCKS
    b = chunk // row_chunks
    c = chunk % row_chunks
    channels = (pid % CHANNEL_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < W
    t0 = c * CHUNK
    taps = load_taps(weight, channels, mask, TAPS)
    window = window_before(
        x,
        first,
        initial_state,
        b,
        t0,
        length,
        stride_b,
        channels,
        mask,
        W,
        STRIDE_T,
        REACH,
        HAS_FIRST,
        HAS_INITIAL,
        BLOCK,
    )
    pending = ()
    open_ = ()
    sums = (tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32))
    for _k in tl.static_range(REACH):
        pending = pending + (tl.zeros([BLOCK], tl.float32),)
        open_ = open_ + (length > 0,)
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
    state = (window, pending, open_, sums)
    # From here on tokens are counted from the chunk's first: ``left`` of them exist.
    left = length - t0
    first_kept = 0
    if c == 0:
        first_kept = -REACH * HAS_INITIAL
    x += b.to(tl.int64) * stride_b + t0.to(tl.int64) * STRIDE_T
    token = b.to(tl.int64) * length + t0
    grad_y += token * W
    grad_x += token * W
    first += token
    grad_final_state += b.to(tl.int64) * (REACH * W)
    grad_initial_state += b.to(tl.int64) * (REACH * W)
    arrays = (x, grad_y, first, grad_final_state, grad_x, grad_initial_state)
    if HAS_FIRST:
        # Runs of pieces without a first token in a loop of their own, the same as where there are none at all: as a
        # branch of one loop it could not be pipelined, and the two bodies would take each other's registers.
        # (In a for loop over the runs Triton 3.6 and 3.7 take ``piece`` for a constant.)
        PIECES: tl.constexpr = CHUNK // STEP
        holds = pieces_with_first(first, left, CHUNK, STEP)
        piece = c * 0
        while piece < PIECES:
            upto = tl.min(tl.where(holds >= piece, holds, PIECES), axis=0)
            state = pass_pieces(
                state, arrays, taps, piece * STEP, upto * STEP, left, first_kept, channels, mask,
                W, STRIDE_T, REACH, STEP, False, HAS_FINAL, HAS_INITIAL, EVEN, TAIL, STAGES,
            )  # fmt: skip
            piece = tl.minimum(upto + 1, PIECES)
            state = pass_pieces(
                state, arrays, taps, upto * STEP, piece * STEP, left, first_kept, channels, mask,
                W, STRIDE_T, REACH, STEP // 2, True, HAS_FINAL, HAS_INITIAL, EVEN, TAIL, STAGES,
            )  # fmt: skip
    else:
        state = pass_pieces(
            state, arrays, taps, 0, CHUNK, left, first_kept, channels, mask,
            W, STRIDE_T, REACH, STEP, False, HAS_FINAL, HAS_INITIAL, EVEN, TAIL, STAGES,
        )  # fmt: skip
    window, pending, open_, sums = state
    for j in tl.static_range(REACH):
        inside = CHUNK + j < left
        flag = is_first(first, CHUNK + j, inside, HAS_FIRST)
        dy = load_token(grad_y + (CHUNK + j) * W, channels, mask, inside, EVEN, True).to(tl.float32)
        pending, open_ = finish(
            pending, open_, taps, dy, flag, CHUNK + j, left, first_kept, grad_final_state,
            grad_x + (CHUNK + j - REACH) * W, grad_initial_state, channels, mask, W, REACH, HAS_FIRST, HAS_FINAL,
            HAS_INITIAL, EVEN, TAIL, CHUNK + j >= REACH,
        )  # fmt: skip
        pending = push(pending, tl.zeros([BLOCK], tl.float32), REACH)
        open_ = push(open_, left > 0, REACH)
    partial = partials + chunk.to(tl.int64) * ((TAPS + 1) * W)
    for k in tl.static_range(TAPS + 1):
        tl.store(partial + k * W + channels, sums[k], mask=mask)


@triton.jit(do_not_specialize=["programs"])
def conv_parameters_kernel(
    partials, gradients, programs, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums the chunks' partial gradients: weight ``[W, K]``, then bias ``[W]``."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < (TAPS + 1) * W
    total = column_sums(partials, programs, (TAPS + 1) * W, columns, mask, ROWS, BLOCK)
    back = columns // W
    place = (columns % W) * TAPS + (TAPS - 1 - back)
    tl.store(gradients + tl.where(back < TAPS, place, columns), total, mask=mask)
