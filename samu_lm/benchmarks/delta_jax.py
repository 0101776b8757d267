"""A chunked gated delta rule in JAX, to be measured beside this project's on the same machine (extra ``bench``).

The same algorithm as XLA likes it best: a scan over chunks whose body is checkpointed, so that, like ``chunked``, it
keeps the states between chunks alone; the triangular inverse by halves, which is quicker here than one triangular solve
and than products of powers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SOLVED = 16  # triangles of this size are solved for directly


def _inverse(a: Any) -> Any:
    """(I + a)^-1 of strictly lower triangles ``[..., n, n]``."""
    import jax.numpy as jnp
    from jax import lax

    n = a.shape[-1]
    if n <= _SOLVED:
        eye = jnp.eye(n, dtype=a.dtype)
        right = jnp.broadcast_to(eye, a.shape)
        return lax.linalg.triangular_solve(eye + a, right, left_side=True, lower=True, unit_diagonal=True)
    m = n // 2
    x, y = _inverse(a[..., :m, :m]), _inverse(a[..., m:, m:])
    corner = -(y @ a[..., m:, :m] @ x)
    upper, lower = jnp.concatenate([x, jnp.zeros_like(x)], -1), jnp.concatenate([corner, y], -1)
    return jnp.concatenate([upper, lower], -2)


def _step(state: Any, chunk: tuple[Any, ...]) -> tuple[Any, Any]:
    import jax.numpy as jnp

    q, k, v, g, beta = chunk
    size = g.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    d = jnp.exp(jnp.where(lower, g[..., :, None] - g[..., None, :], -jnp.inf))
    from_start = jnp.exp(g)[..., None]
    a = jnp.tril(beta[..., None] * d * (k @ k.mT), -1)
    u = _inverse(a) @ (beta[..., None] * (v - from_start * (k @ state)))
    o = from_start * (q @ state) + (d * (q @ k.mT)) @ u
    end = g[..., -1:]
    return jnp.exp(end)[..., None] * state + (k * jnp.exp(end - g)[..., None]).mT @ u, o


def _chunked(size: int, q: Any, k: Any, v: Any, log_alpha: Any, beta: Any) -> Any:
    import jax
    import jax.numpy as jnp

    batch, length, heads, dk = q.shape

    def cut(x: Any) -> Any:
        x = x.reshape(batch, length // size, size, heads, *x.shape[3:])
        return jnp.moveaxis(x, 3, 2).swapaxes(0, 1)

    q, k, v, log_alpha, beta = map(cut, (q, k, v, log_alpha, beta))
    chunks = (q, k, v, jnp.cumsum(log_alpha, -1), beta)
    state = jnp.zeros((batch, heads, dk, v.shape[-1]), q.dtype)
    _, o = jax.lax.scan(jax.checkpoint(_step), state, chunks)
    return jnp.moveaxis(o.swapaxes(0, 1), 2, 3).reshape(batch, length, heads, -1)


def build(inputs: list[Tensor], grad_o: Tensor, size: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Compiled calls by mode, ``fwd`` and ``fwd_bwd``, each returning o and then the gradients as tensors.

    Args:
        inputs: q, k, v, log_alpha, beta, float32 on the CPU; the length must be a multiple of the chunk size.
        grad_o: the incoming gradient.
        size: chunk size.

    Raises:
        ImportError: JAX is not installed.
    """
    import jax
    import jax.numpy as jnp

    arrays = [jnp.asarray(x.detach().numpy()) for x in inputs]
    cotangent = jnp.asarray(grad_o.numpy())

    def both(*xs: Any) -> Any:
        o, pull = jax.vjp(lambda *ys: _chunked(size, *ys), *xs[:5])
        return (o, *pull(xs[5]))

    forward, backward = jax.jit(lambda *xs: (_chunked(size, *xs),)), jax.jit(both)

    def call(function: Any, *args: Any) -> list[Tensor]:
        return [torch.from_dlpack(x) for x in jax.block_until_ready(function(*args))]

    return {"fwd": lambda: call(forward, *arrays), "fwd_bwd": lambda: call(backward, *arrays, cotangent)}
