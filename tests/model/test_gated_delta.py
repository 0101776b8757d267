"""The gated delta rule's mixer by itself; what it shares with the others is tested with them."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from samu_lm.model import GatedDelta
from tests.ops.gated_delta.oracle import delta_loop
from tests.ops.support import random_reset, relative_error


def test_against_the_equations() -> None:
    """The whole mixer in float64, one operation at a time, on one document per row."""
    mixer, x = GatedDelta(12, 16, num_heads=2), torch.randn(2, 20, 12)
    y = mixer(x)
    p = {name: value.detach().double() for name, value in mixer.named_parameters()}
    x = x.double()
    qkv = F.pad(x @ p["linear_qkv.weight"].T, (0, 0, 3, 0))
    qkv = F.silu(sum(qkv[:, i : i + 20] * p["conv.weight"][:, i] for i in range(4)) + p["conv.bias"])
    q, k, v = (part.view(2, 20, 2, 8) for part in qkv.split(16, -1))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    step, beta = (x @ p["linear_controls.weight"].T).split(2, -1)
    log_alpha = -p["rate_log"].exp() * F.softplus(step + p["step_bias"])
    o, _ = delta_loop(q, k, v, log_alpha, beta.sigmoid())
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * (1 + p["norm.scale"])
    expected = (o.flatten(2) * F.silu(x @ p["linear_gate.weight"].T)) @ p["linear_out.weight"].T
    assert relative_error(y, expected) < 1e-5


def test_backends_agree() -> None:
    """``triton`` (interpreted here) is the function that ``reference`` is, state and gradients included."""
    results = []
    x, reset = torch.randn(1, 20, 12), random_reset(1, 20)
    for backend in ("reference", "triton"):
        torch.manual_seed(0)
        mixer = GatedDelta(12, 16, num_heads=1, backend=backend)
        y, (conv, state) = mixer(x, reset, return_state=True)
        grads = torch.autograd.grad(y.square().sum() + state.sum(), list(mixer.parameters()))
        results.append([y, conv, state, *grads])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < 1e-4


def test_state_shapes() -> None:
    mixer = GatedDelta(12, 24, num_heads=3)
    _, (conv, state) = mixer(torch.randn(2, 5, 12), return_state=True)
    assert (conv.shape[1:], state.shape[1:]) == mixer.state_shapes() == ((3, 72), (3, 8, 8))
