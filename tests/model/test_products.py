"""Products whose weight gradients are summed in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samu_lm.model.products import bare_product, gradient_parts, is_plain, product, whole_product

D, W, HIDDEN = 1536, 2048, 4608


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_output_and_gradients(parts: int, biased: bool, amp: bool) -> None:
    x, weight, bias = torch.randn(2, 6, 5), torch.randn(7, 5), torch.randn(7) if biased else None
    cotangent = torch.randn(2, 6, 7)

    def results(dtype: torch.dtype, parts: int, amp: bool) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias) if t is not None]
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = product(*leaves[:2], leaves[2] if biased else None, parts=parts)
        return [y, *torch.autograd.grad(y, leaves, cotangent.to(y.dtype))]

    tolerance = {"atol": 0.1, "rtol": 0.03} if amp else {"atol": 1e-5, "rtol": 1e-5}
    found = results(torch.float32, parts, amp)
    assert found[0].dtype == (torch.bfloat16 if amp else torch.float32)
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    for value, true in zip(found, results(torch.float64, 1, False), strict=True):
        torch.testing.assert_close(value.double(), true, **tolerance)


def test_parts_compile_to_one_graph() -> None:
    x, weight = torch.randn(8, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    for call in (product, compiled):
        gradients = torch.autograd.grad(call(x, weight, parts=2).square().sum(), (x, weight))
        torch.testing.assert_close(gradients, torch.autograd.grad((x @ weight.T).square().sum(), (x, weight)))


def test_parts_by_shape() -> None:
    # 192 tiles of 192 x 192 are 1.45 rounds of 132 processors, twice as many are 2.9.
    assert gradient_parts(65_536, D, HIDDEN) == 2
    assert gradient_parts(65_536, W, D) == gradient_parts(65_536, D, W) == gradient_parts(65_536, 2 * HIDDEN, D) == 1
    assert gradient_parts(65_537, D, HIDDEN) == 1, "parts of one size"
    assert gradient_parts(2048, D, HIDDEN) == 1, "too few tokens"
    assert gradient_parts(0, D, HIDDEN) == 1


def test_other_numbers_of_tokens_do_not_recompile() -> None:
    graphs: list[object] = []

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * gradient_parts(x.shape[0], W, D)

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(scale, backend=count, dynamic=True)
    for tokens in (4, 5, 6, 7, 8, 9, 4096, 6144):
        compiled(torch.ones(tokens))
    assert len(graphs) == 1


def test_a_bias_is_left_only_by_a_plain_map() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    x, plain, other = torch.randn(3, 4), nn.Linear(4, 5), Doubled(4, 5)
    y, bias = bare_product(plain, x)
    assert bias is plain.bias
    torch.testing.assert_close(y + bias, plain(x))
    y, bias = bare_product(other, x)
    assert bias is None
    torch.testing.assert_close(y, other(x))
    torch.testing.assert_close(whole_product(other, x), other(x))
    torch.testing.assert_close(whole_product(plain, x), plain(x))


@pytest.mark.parametrize("listen", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_map_that_somebody_listens_to_is_not_plain(listen: str) -> None:
    linear = nn.Linear(4, 5)
    assert is_plain(linear)
    handle = getattr(linear, f"register_{listen}")(lambda *_: None)
    assert not is_plain(linear)
    handle.remove()
    assert is_plain(linear)
