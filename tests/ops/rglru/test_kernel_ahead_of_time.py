"""RG-LRU's kernels compile for an H100 or H200 on a machine without one: what the interpreter cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Most shared memory that a program may use on compute capability 9.0, in bytes.
_SHARED_MEMORY = 232_448

_COMPILE = """
import json, sys
import torch
from samu_lm.ops.common.launch import compile_only
from samu_lm.ops.rglru import kernel

w, kind, first, state = json.loads(sys.argv[1])
blocks, dtype = 2, getattr(torch, kind)
width = blocks * max(w, 1)
if w == 0:
    blocks, width = 1, 70
x = torch.empty(2, 8192, width, dtype=dtype)
mask = torch.empty(2, 8192, dtype=torch.bool) if first else None
initial = torch.empty(2, width) if state else None
a_param = torch.empty(width)
with compile_only() as compiled:
    if w:
        gates = [torch.empty(blocks, w, w), torch.empty(blocks, w)] * 2
        y, final, saved = kernel._mixer(x, *gates, a_param, mask, initial, True, "")
        kernel._mixer_backward(y, final, saved, x, *gates, a_param, mask, state)
    else:
        y, final, saved = kernel._scan(x, x, x, a_param, mask, initial, True, "")
        kernel._scan_backward(y, final, saved, x, x, x, a_param, mask, state)
print(json.dumps([(name, k.metadata.shared, k.asm["ptx"].count("wgmma.mma_async")) for name, k in compiled]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("w", "kind", "first", "state", "names"),
    [
        (64, "bfloat16", True, False, ["forward"] * 2 + ["summary", "gradient", "reduce"]),
        (128, "bfloat16", True, False, ["forward"] * 2 + ["summary", "gradient", "projection", "reduce"]),
        (160, "float16", False, True, ["forward"] * 2 + ["summary", "gradient", "projection", "reduce"]),
        (0, "float32", True, True, ["forward"] * 2 + ["summary", "gradient", "reduce"]),
    ],
    ids=["whole blocks", "halves", "slices", "from logits"],
)
def test_compiles(w: int, kind: str, first: bool, state: bool, names: list[str]) -> None:
    """Every launch compiles, fits the chip's shared memory, and its products are on the tensor cores."""
    case = json.dumps([w, kind, first, state])
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", _COMPILE, case], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert [name.removesuffix("_kernel") for name, _, _ in compiled] == names
    for name, shared, products in compiled:
        assert shared <= _SHARED_MEMORY, name
        assert (products > 0) == (w > 0 and name != "reduce_kernel"), name
