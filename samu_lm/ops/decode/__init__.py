"""One token of a whole model in a few kernels, for decoding on a GPU: see ``step.py``.

Importing this needs Triton.
"""

from samu_lm.ops.decode.plan import Plan, Split, default_plan
from samu_lm.ops.decode.step import (
    BlockWeights,
    Buffers,
    Linear,
    RGLRUWeights,
    SAMUWeights,
    Weights,
    decode_token,
    make_buffers,
)

__all__ = [
    "BlockWeights",
    "Buffers",
    "Linear",
    "Plan",
    "RGLRUWeights",
    "SAMUWeights",
    "Split",
    "Weights",
    "decode_token",
    "default_plan",
    "make_buffers",
]
