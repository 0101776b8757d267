"""Correctness and times of the causal convolution's kernels on a GPU, beside the copy ceiling.

python -m samu_lm.benchmarks.conv_probe OUT.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from samu_lm.benchmarks import timing
from samu_lm.ops import causal_conv1d

SHAPES = ((1, 131072, 1024), (4, 2048, 2048), (1, 32768, 1024))


def conv64(x: Tensor, weight: Tensor, bias: Tensor, first: Tensor) -> Tensor:
    """The convolution in float64, one shift per tap."""
    x, weight = x.double(), weight.double()
    length, taps = x.shape[1], weight.shape[1]
    y = x * weight[:, taps - 1] + bias.double()
    visible = torch.ones_like(first)
    for back in range(1, taps):
        visible = visible & ~torch.nn.functional.pad(first, (back - 1, 0))[:, :length]
        shifted = torch.nn.functional.pad(x, (0, 0, back, 0))[:, :length]
        y = y + torch.where(visible[..., None], shifted, 0) * weight[:, taps - 1 - back]
    return y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    record = []
    for shape in SHAPES:
        batch, length, width = shape
        x = torch.randn(shape, device="cuda").bfloat16().requires_grad_()
        weight = (torch.randn(width, 4, device="cuda") / 2).requires_grad_()
        bias = torch.randn(width, device="cuda").requires_grad_()
        first = torch.rand(batch, length, device="cuda") < 0.01
        first[:, 0] = True
        grad_y = torch.randn(shape, device="cuda").bfloat16()
        leaves = [x, weight, bias]

        def forward(x=x, weight=weight, bias=bias, first=first) -> Tensor:
            return causal_conv1d(x, weight, bias, reset=first, backend="triton")[0]

        def both(forward=forward, leaves=leaves, grad_y=grad_y) -> tuple[Tensor, ...]:
            y = forward()
            return (y, *torch.autograd.grad(y, leaves, grad_y))

        small = [x[:, :2000].detach().clone().requires_grad_(), *leaves[1:]]
        expected = conv64(small[0], weight, bias, first[:, :2000])
        actual = causal_conv1d(small[0], weight, bias, reset=first[:, :2000], backend="triton")[0]
        grads = [torch.autograd.grad(y, small, grad_y[:, :2000].to(y.dtype)) for y in (actual, expected)]
        pairs = [(actual, expected), *zip(*grads, strict=True)]
        errors = [float((a.double() - e.double()).norm() / e.double().norm()) for a, e in pairs]
        assert max(errors) < 4e-3, errors
        row = {
            "shape": shape,
            "errors": errors,
            "forward_ms": timing.event_median(forward),
            "both_ms": timing.event_median(both),
            "graph_ms": timing.graph_median(both),
            "kernels": timing.kernel_times(both),
        }
        record.append(row)
        print(json.dumps(row))
    args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
