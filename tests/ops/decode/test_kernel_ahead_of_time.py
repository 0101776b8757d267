"""The decoder's kernels compile for an H100 or H200 on a machine without one, keep to registers, and ask early."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_COMPILE = """
import json, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from samu_lm.model import RecurrentLM
from samu_lm.model.decoder import weights_of
from samu_lm.ops.common.launch import compile_only
from samu_lm.ops.decode import Plan, decode_token, default_plan, make_buffers

sizes, mixer, batch, found = json.loads(sys.argv[1])
with torch.device("meta"):
    model = RecurrentLM(**sizes, depth=1, mixer=mixer)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.to(torch.bfloat16)
    weights = weights_of(model)
with compile_only() as compiled:
    plan = default_plan(mixer, batch) if found else Plan()
    decode_token(weights, make_buffers(weights, batch, model.vocab_size, plan), plan, overlaps=True)
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
with tempfile.TemporaryDirectory() as folder:
    for name, kernel in compiled:
        ptx, usage = kernel.asm["ptx"], ""
        if tool.exists():
            binary = Path(folder) / "kernel.cubin"
            binary.write_bytes(kernel.asm["cubin"])
            usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True).stdout
        early = ptx[: ptx.find("griddepcontrol.wait")].count("ld.global") if "griddepcontrol.wait" in ptx else 0
        print(json.dumps([name, usage, early]))
"""

_400M = {"vocab_size": 32_000, "width": 1536, "rnn_width": 2048}
_ODD = {"vocab_size": 77, "width": 28, "rnn_width": 80}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mixer", "batch", "found"),
    [
        (_400M, "samu", 1, True),
        (_400M, "rglru", 1, True),
        (_400M, "rglru", 16, True),
        (_ODD, "samu", 3, True),
        (_ODD, "rglru", 3, False),
    ],
    ids=["samu", "rglru", "16 rows", "odd sizes", "odd sizes, small plan"],
)
def test_compiles(sizes: dict[str, int], mixer: str, batch: int, found: bool) -> None:
    """Every launch compiles, spills nothing, and has asked for its weights before it waits for the last kernel."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _COMPILE, json.dumps([sizes, mixer, batch, found])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    order = ["embed", "paired", mixer, "residual", "paired", "residual", "logits", "choose"]
    assert [name.removesuffix("_kernel") for name, _, _ in compiled] == order
    for name, usage, early in compiled:
        assert ("STACK:0" in usage and "LOCAL:0" in usage) or not usage, (name, usage)
        assert early >= 2 or name in ("embed_kernel", "choose_kernel"), name
