"""Every kernel here compiles for an H100 or H200 (sm_90) on a machine without a GPU.

The interpreter accepts more than the compiler does, and says nothing of registers and shared memory. It cannot be
switched off within a process, so the compiler runs in one of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Most shared memory that a program may use on compute capability 9.0, in bytes.
SHARED_MEMORY = 232_448

MIXER = """
import json, sys
import torch
from samu_lm.ops.common.launch import compile_only
from samu_lm.ops.samu import kernel_passes as passes
from samu_lm.ops.samu.kernel_plan import Plan, plan_for, use_plan

options = json.loads(sys.argv[1])
batch, length, width = options["shape"]
def hollow(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")

x = hollow(batch, length, width, dtype=getattr(torch, options["dtype"]))
vectors = [hollow(n) for n in (width // 2, width // 2, width + 1, width + 1)]
parameters = passes.Parameters(*vectors, hollow(), hollow())
first = hollow(batch, length, dtype=torch.bool) if options["resets"] else None
state = hollow(batch, width) if options["state"] else None
plan = plan_for(batch, length, width) if options["plan"] is None else Plan(**options["plan"])
with use_plan(plan), compile_only() as compiled:
    y, final, kept = passes.mixer_forward(x, parameters, first, state, True)
    passes.mixer_backward(y, final if state is not None else None, x, parameters, kept, state is not None)
    if options["given"]:
        passes.mixer_forward(x[:, :1], parameters, first, state, False)
        eta = hollow(batch, length)
        y, final, kept = passes.scan_forward(x, eta, eta, *vectors[:2], first, state, True)
        passes.scan_backward(y, None, x, *vectors[:2], kept, state is not None)
        eta, delta, kept = passes.controls_forward(x, *vectors[2:], *parameters[4:])
        passes.controls_backward(eta, delta, x, *parameters[4:], kept)
print(json.dumps([(name, k.metadata.shared) for name, k in compiled]))
"""

CONVOLUTION = """
import importlib, json, sys
import torch
from samu_lm.ops.common.launch import compile_only

conv = importlib.import_module("samu_lm.ops.causal_conv1d.kernel")
def hollow(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")

def compile(batch, length, width, taps, dtype, resets, state):
    x, weight, bias = hollow(batch, length, width, dtype=dtype), hollow(width, taps), hollow(width)
    first = hollow(batch, length, dtype=torch.bool) if resets else None
    initial = hollow(batch, taps - 1, width) if state else None
    y, final = conv._forward(x, weight, bias, first, initial)
    conv._backward(y, final if state else None, x, weight, first, initial)

with compile_only() as compiled:
    for resets in (False, True):
        for state in (False, True):
            compile(2, 300, 1024, 4, torch.bfloat16, resets, state)
    compile(1, 131072, 1024, 4, torch.bfloat16, True, False)
    compile(3, 301, 70, 5, torch.float32, True, True)
    compile(3, 64, 70, 2, torch.float16, True, False)
    compile(2, 300, 1024, 1, torch.float32, True, True)
# a piece with a first token is looked for again and again: the compiler must not take the first for all
walks = [k.asm["ttgir"].partition("scf.while") for name, k in compiled if name == "conv_gradients_kernel"]
assert sum('"tt.reduce"' in loop for _, _, loop in walks) == 5, [len(loop) for _, _, loop in walks]
print(json.dumps([(name, k.metadata.shared) for name, k in compiled]))
"""

ELEMENTWISE = """
import json
import torch
from samu_lm.ops.common.launch import compile_only
from samu_lm.ops.cross_entropy import kernel as loss
from samu_lm.ops.gated_gelu import kernel as gelu
from samu_lm.ops.residual_norm import kernel as norm

def hollow(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype, device="meta")

with compile_only() as compiled:
    for dtype in (torch.bfloat16, torch.float32):
        x, bias = hollow(300, 2 * 4608, dtype=dtype), hollow(2 * 4608, dtype=torch.float32)
        gelu._gelu._init_fn(x, bias)
        gelu._gelu_backward._init_fn(hollow(300, 4608, dtype=dtype), x, bias)
        gate, bias = hollow(300, 1536, dtype=dtype), hollow(1536, dtype=torch.float32)
        gelu._product._init_fn(gate, gate, bias)
        gelu._product_backward._init_fn(gate, gate, gate, bias)
        for width, branch in ((1536, torch.bfloat16), (70, torch.float16), (2560, dtype)):
            stream, scale = hollow(300, width, dtype=dtype), hollow(width, dtype=torch.float32)
            grad = hollow(300, width, dtype=branch)
            for bias in (scale, None):
                norm._norm._init_fn(stream, grad, bias, scale, 1e-6)
                for given, grads in ((stream, [grad]), (None, [grad]), (stream, [grad, grad])):
                    norm._norm_backward._init_fn(given, grads, stream, scale, 1e-6, bias is not None)
        for differentiate in (True, False):
            for vocabulary in (32000, 50304):
                logits, labels = hollow(300, vocabulary, dtype=dtype), hollow(300, dtype=torch.int64)
                for counting in (vocabulary, vocabulary - 3):
                    loss._losses._init_fn(logits, labels, counting, differentiate)
print(json.dumps([(name, k.metadata.shared) for name, k in compiled]))
"""


def compile_apart(program: str, *arguments: str) -> dict[str, int]:
    """Runs a program that prints its kernels, without the interpreter; shared memory by kernel."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


CASES: dict[str, tuple[dict[str, object], str]] = {
    "as dispatched": (
        {"shape": [1, 131072, 1024], "dtype": "bfloat16", "resets": True, "state": False, "given": False, "plan": None},
        "spectrum_table group_states carries outputs chunk_adjoints gradients parameter_gradients",
    ),
    "every path": (
        {"shape": [3, 1001, 70], "dtype": "float32", "resets": False, "state": True, "given": True}
        | {"plan": {"chunk": 16, "group": 8, "block": 32, "gradient_block": 32}},
        "controls chunk_states given_controls public_controls rank_two scan_token_gradients step",
    ),
    "one pass": (
        {"shape": [2, 500, 130], "dtype": "float16", "resets": True, "state": True, "given": False}
        | {"plan": {"chunk": 32, "save_every": 16, "fused": True, "fused_controls": True, "piece": 16, "tiles": True}},
        "controls_and_states gradients",
    ),
}
CONVOLUTIONS = "conv conv_gradients conv_parameters"
GELU, NORM, LOSS = "gelu gelu_gradients", "residual_norm residual_norm_gradients", "cross_entropy"
# The test_kernel_ahead_of_time.py of their own folders compile these.
RGLRU = "forward summary gradient projection reduce"
GATED_DELTA = "prepare scan output local adjoint gradients"
DECODE = "embed paired samu rglru residual logits choose"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kernels"), CASES.values(), ids=CASES.keys())
def test_mixer_compiles(case: dict[str, object], kernels: str) -> None:
    shared = compile_apart(MIXER, json.dumps(case))
    assert {f"{name}_kernel" for name in kernels.split()} <= set(shared)
    assert all(size <= SHARED_MEMORY for size in shared.values()), shared


@pytest.mark.slow
def test_convolution_compiles() -> None:
    shared = compile_apart(CONVOLUTION)
    assert set(shared) == {f"{name}_kernel" for name in CONVOLUTIONS.split()}


@pytest.mark.slow
def test_activation_and_loss_compile() -> None:
    shared = compile_apart(ELEMENTWISE)
    assert set(shared) == {f"{name}_kernel" for name in (*GELU.split(), *NORM.split(), LOSS, "column_sums")}


def test_no_kernel_is_left_out() -> None:
    covered = {
        "samu": " ".join(kernels for _, kernels in CASES.values()),
        "causal_conv1d": CONVOLUTIONS,
        "rglru": RGLRU,
        "gated_delta": GATED_DELTA,
        "gated_gelu": GELU,
        "residual_norm": NORM,
        "cross_entropy": LOSS,
        "decode": DECODE,
    }
    found: dict[str, set[str]] = {}
    for source in (Path(__file__).parents[2] / "samu_lm" / "ops").rglob("kernel*.py"):
        names = re.findall(r"^def (\w+)_kernel\(", source.read_text(), re.MULTILINE)
        found.setdefault(source.parent.name, set()).update(names)
    assert found == {op: set(names.split()) for op, names in covered.items()}
