"""The gated delta rule in chunks, in plain jnp: products of matrices within a chunk, and one step per chunk.

Within a chunk the changes of the memory are v' = X (β v) - X (β e^c k) S, with S the memory before the chunk, c the
running sum of the log decays and X = (1 + L)⁻¹, L_ij = β_i e^(c_i - c_j) k_i·k_j for j < i (the WY form of Yang et al.,
"Gated Delta Networks", 2024). All but S is computed for all chunks at once.

N chunks · B rows of a chunk · K key heads · G value heads of a key head · C key width · V value width
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# The inverse of 1 + L for strictly lower triangular L. B rows, a power of two


@jax.custom_vjp
def inverse_of_unit_lower(l_BB: Float[Array, "*N B B"]) -> Float[Array, "*N B B"]:
    """(1 + L)⁻¹ by blocks that double: [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ C A⁻¹, D⁻¹]].

    As stable as forward substitution. A sum of powers of L needs as few products, and cancels badly where keys repeat.

    >>> inverse_of_unit_lower(jnp.array([[0.0, 0.0], [0.5, 0.0]])).tolist()
    [[1.0, 0.0], [-0.5, 1.0]]
    """
    rows, size, lead = l_BB.shape[-1], 1, l_BB.shape[:-2]
    inverse = jnp.ones((*lead, rows, 1, 1), l_BB.dtype)  # of the blocks on the diagonal
    while size < rows:
        pairs = rows // (2 * size)
        blocks = l_BB.reshape(*lead, pairs, 2, size, pairs, 2, size)
        below = jnp.moveaxis(jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, len(lead))
        a, d = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -_dot(d, _dot(below, a))
        top, bottom = jnp.concatenate([a, jnp.zeros_like(a)], -1), jnp.concatenate([corner, d], -1)
        inverse, size = jnp.concatenate([top, bottom], -2), 2 * size
    return inverse[..., 0, :, :]


def _forward(l_BB):
    inverse = inverse_of_unit_lower(l_BB)
    return inverse, inverse


def _backward(inverse, dy):
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_dot(turned, _dot(dy, turned)), -1),)


inverse_of_unit_lower.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


Walk = Callable[..., tuple[jax.Array, jax.Array]]


def delta_rule_in_chunks(
    q_NBKC: Float[Array, "N B K C"],
    k_NBKC: Float[Array, "N B K C"],
    v_NBHV: Float[Array, "N B H V"],
    decay_NBH: Float[Array, "N B H"],
    beta_NBH: Float[Array, "N B H"],
    first_N: Bool[Array, " N"],
    *,
    precision: str | None = None,
    walk: Walk | None = None,
    last_M: Int[Array, " M"] | None = None,
) -> tuple[Float[Array, "N B H V"], Float[Array, "M H C V"] | None]:
    """Computes the rule on chunks in order; a chunk that is first of its segment starts from an empty memory.

    All arrays are float32. Rows without content have zeros everywhere.

    Args:
        walk: (u, w, late k, decay of a chunk, first) → (memory before each chunk, changes); None: `scan_chunks`.
        last_M: chunks whose memories afterwards are returned, too.
    """
    run_chunks: Walk = walk or partial(scan_chunks, precision=precision)

    def dot(equation: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, precision=precision)

    N, B, K, _ = k_NBKC.shape
    q, k = (x.transpose(0, 2, 1, 3) for x in (q_NBKC, k_NBKC))  # [N, K, B, C]
    v = v_NBHV.reshape(N, B, K, -1, v_NBHV.shape[-1]).transpose(0, 2, 3, 1, 4)  # [N, K, G, B, V]
    decay, beta = (x.reshape(N, B, K, -1).transpose(0, 2, 3, 1) for x in (decay_NBH, beta_NBH))  # [N, K, G, B]
    c = jnp.cumsum(decay, axis=-1)
    earlier = jnp.tril(jnp.ones((B, B), bool))
    between = jnp.exp(jnp.where(earlier, c[..., :, None] - c[..., None, :], -jnp.inf))  # e^(c_i - c_j), j ≤ i
    products = dot("nkic,nkjc->nkij", k, k)[:, :, None] * between * beta[..., None]
    x = inverse_of_unit_lower(jnp.where(jnp.tril(earlier, -1), products, 0.0))
    u = dot("nkgij,nkgjv->nkgiv", x, v * beta[..., None])
    w = dot("nkgij,nkgjc->nkgic", x, k[:, :, None] * (beta * jnp.exp(c))[..., None])
    late_k = k[:, :, None] * jnp.exp(c[..., -1:] - c)[..., None]

    by_head = [x.reshape(N, -1, *x.shape[3:]) for x in (u, w, late_k, jnp.exp(c[..., -1]))]
    memory, changes = run_chunks(by_head[0], by_head[1], by_head[2], by_head[3], first_N)
    states = None
    if last_M is not None:
        added = dot("mhbc,mhbv->mhcv", by_head[2][last_M], changes[last_M])
        states = memory[last_M] * by_head[3][last_M][..., None, None] + added
    memory, changes = (x.reshape(*u.shape[:3], *x.shape[2:]) for x in (memory, changes))
    inside = dot("nkic,nkjc->nkij", q, k)[:, :, None] * between
    o = dot("nkgic,nkgcv->nkgiv", q[:, :, None] * jnp.exp(c)[..., None], memory)
    o = o + dot("nkgij,nkgjv->nkgiv", inside, changes)
    return o.transpose(0, 3, 1, 2, 4).reshape(v_NBHV.shape), states


def scan_chunks(
    u_NHBV: Float[Array, "N H B V"],
    w_NHBC: Float[Array, "N H B C"],
    late_NHBC: Float[Array, "N H B C"],
    decay_NH: Float[Array, "N H"],
    first_N: Bool[Array, " N"],
    *,
    precision: str | None = None,
) -> tuple[Float[Array, "N H C V"], Float[Array, "N H B V"]]:
    """Computes `triton.walk` with one step of a loop per chunk."""

    def step(memory: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        u, w, late, decay, first = chunk
        memory = jnp.where(first, 0.0, memory)
        changes = u - jnp.einsum("hbc,hcv->hbv", w, memory, precision=precision)
        after = memory * decay[:, None, None] + jnp.einsum("hbc,hbv->hcv", late, changes, precision=precision)
        return after, (memory, changes)

    start = jnp.zeros((u_NHBV.shape[1], w_NHBC.shape[-1], u_NHBV.shape[-1]), u_NHBV.dtype)
    return lax.scan(step, start, (u_NHBV, w_NHBC, late_NHBC, decay_NH, first_N))[1]
