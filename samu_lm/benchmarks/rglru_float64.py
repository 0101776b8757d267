"""The RG-LRU mixer in float64 from the equations of its definition, whole sequences at once: what times are gated by.

Shapes: x ``[B, L, W]``, W = H w; gate weights ``[H, w, w]``, biases ``[H, w]``; a_param ``[W]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samu_lm.benchmarks.float64 import scan64

BLOCKS = 16
NAMES = ("x", "input_gate_weight", "input_gate_bias", "a_gate_weight", "a_gate_bias", "a_param")


def draw(shape: tuple[int, int, int], dtype: torch.dtype, device: str, blocks: int = BLOCKS) -> dict[str, Tensor]:
    """Inputs as at initialisation, packed documents of about 1,000 tokens; weights already rounded to ``dtype``."""
    batch, length, width = shape
    w = width // blocks
    gen = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device)

    first = torch.rand(batch, length, generator=gen, device=device) < 1e-3
    first[:, 0] = True
    squared = 0.81 + 0.188 * torch.rand(width, generator=gen, device=device)
    return {
        "x": normal(*shape).to(dtype),
        "input_gate_weight": (normal(blocks, w, w) * w**-0.5).to(dtype).float(),
        "input_gate_bias": normal(blocks, w) * 0.3,
        "a_gate_weight": (normal(blocks, w, w) * w**-0.5).to(dtype).float(),
        "a_gate_bias": normal(blocks, w) * 0.3,
        "a_param": torch.log(torch.expm1(-torch.log(squared) / 2)),
        "first": first,
        "grad_y": normal(*shape).to(dtype),
    }


def reference64(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and every gradient in float64, from the equations."""
    x, dy = inputs["x"].double(), inputs["grad_y"].double()
    wi, bi, wa, ba, param = (
        inputs[n].double() for n in ("input_gate_weight", "input_gate_bias", "a_gate_weight", "a_gate_bias", "a_param")
    )
    blocks, w = bi.shape
    split = x.view(-1, blocks, w).transpose(0, 1)
    i = torch.baddbmm(bi[:, None], split, wi).sigmoid().transpose(0, 1).reshape(x.shape)
    r = torch.baddbmm(ba[:, None], split, wa).sigmoid().transpose(0, 1).reshape(x.shape)
    rate = -8 * torch.nn.functional.softplus(param)
    mask = inputs["first"][..., None]
    a = (r * rate).exp()
    z = -torch.expm1(2 * r * rate)
    b = z.sqrt().masked_fill(mask, 1)
    decay = a.masked_fill(mask, 0)
    h = scan64(decay, b * i * x)
    follow = torch.cat([torch.zeros_like(decay[:, :1]), decay[:, 1:].flip(1)], 1)
    g = scan64(follow, dy.flip(1)).flip(1)
    del follow
    before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
    d_log_a = g * decay * before - (g * i * x * 2 * a * a / (4 * z).clamp(min=1e-6).sqrt()).masked_fill(mask, 0)
    d_li, d_la = g * b * x * i * (1 - i), d_log_a * rate * r * (1 - r)
    rows_i, rows_a = (t.view(-1, blocks, w).transpose(0, 1) for t in (d_li, d_la))
    back = torch.bmm(rows_i, wi.transpose(1, 2)) + torch.bmm(rows_a, wa.transpose(1, 2))
    return {
        "y": h,
        "x": g * b * i + back.transpose(0, 1).reshape(x.shape),
        "input_gate_weight": torch.bmm(split.transpose(1, 2), rows_i),
        "input_gate_bias": rows_i.sum(1),
        "a_gate_weight": torch.bmm(split.transpose(1, 2), rows_a),
        "a_gate_bias": rows_a.sum(1),
        "a_param": -8 * (d_log_a * r).sum((0, 1)) * param.sigmoid(),
    }
