"""The gated delta rule's kernels compile for an H100 or H200 on a machine without one, on the tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Most shared memory that a program may use on compute capability 9.0, in bytes.
_SHARED_MEMORY = 232_448
_KERNELS = ["prepare", "scan", "output", "local", "adjoint", "gradients"]

_COMPILE = """
import json, sys
import torch
from samu_lm.ops.common.launch import compile_only
from samu_lm.ops.gated_delta import kernel

kind, dk, dv, size = json.loads(sys.argv[1])
batch, length, heads = 1, 256, 2
q, v = (torch.zeros(batch, length, heads, d, dtype=getattr(torch, kind)) for d in (dk, dv))
gates = torch.zeros(batch, length, heads)
first = torch.zeros(batch, length, dtype=torch.bool)
state = torch.zeros(batch, heads, dk, dv)
with compile_only() as compiled:
    o, final, *kept = kernel._forward(q, q, v, gates, gates, first, state, size)
    kernel._backward(o, final, *kept, q, q, v, gates, gates, first, state, size)
print(json.dumps([(name, k.metadata.shared, k.asm["ptx"].count("mma")) for name, k in compiled]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ["bfloat16", 128, 128, 64],
        ["float16", 128, 128, 128],
        ["float32", 16, 24, 16],
    ],
    ids=str,
)
def test_compiles(case: list[object]) -> None:
    """Every launch compiles, fits the chip's shared memory, and its products are on the tensor cores."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _COMPILE, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert [name.removesuffix("_kernel") for name, *_ in compiled] == _KERNELS
    for name, shared, products in compiled:
        assert shared <= _SHARED_MEMORY, name
        assert products > 0, name
