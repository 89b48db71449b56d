"""The gate of an MLP whose adapters scale the columns of both projections: silu(f · gate) · (f' · up).

As one operation forward reads both projections once and keeps nothing else, and backward reads them once more.

T rows · F width
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.device import interprets, is_hopper
from pallas_kernels.linear.mesh import partition
from pallas_kernels.mlp.xla import silu_gate


def scaled_silu_gate(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    f: Float[Array, "tiles F"],
    f_up: Float[Array, "tiles F"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*B F"]:
    """silu(f · gate) · (f' · up), with factors of the columns for each tile of rows. Products are cast before silu.

    Args:
        gate, up: [..., F], of one dtype.
        f, f_up: float32; their number of rows divides that of `gate`. Where they are 1, nothing changes by a bit.
        implementation: "xla", "pallas_triton" (backward only), or None: by device and shape.

    >>> gate, up = jnp.full((2, 1), 3.0), jnp.ones((2, 1))
    >>> y = scaled_silu_gate(gate, up, jnp.ones((1, 1)), jnp.full((1, 1), 2.0))
    >>> y.shape, f"{y[0, 0]:.2f}"
    ((2, 1), '5.72')
    """
    rows = gate.reshape(-1, gate.shape[-1])
    kernel = _takes_kernel(rows, len(f), implementation)
    return _apply(kernel, rows, up.reshape(rows.shape), f, f_up).reshape(gate.shape)


def _takes_kernel(gate_TF: jax.Array, tiles: int, implementation: str | None) -> bool:
    if implementation == "xla" or partition.mesh_of([gate_TF], implementation) is not None:
        return False
    from pallas_kernels.mlp.triton.scaled_gate import unsupported_reason

    why = unsupported_reason(gate_TF, tiles)
    if implementation == "pallas_triton" and why is not None:
        raise NotImplementedError(f"implementation='pallas_triton' cannot serve this call: {why}")
    return why is None and (implementation == "pallas_triton" or (is_hopper() and gate_TF.dtype != jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(kernel: bool, gate, up, f, f_up):
    return _forward(kernel, gate, up, f, f_up)[0]


def _forward(kernel: bool, gate, up, f, f_up):
    return silu_gate(_scaled(gate, f), _scaled(up, f_up)), (gate, up, f, f_up)


def _backward(kernel: bool, residuals, dh):
    gate, up, f, f_up = residuals
    if kernel:
        from pallas_kernels.mlp.triton.scaled_gate import scaled_gate_backward

        return scaled_gate_backward(dh, gate, up, f, f_up, interpret=interprets())
    gate, up = lax.optimization_barrier((gate, up))  # as for silu_gate
    (scaled, of_gate), (scaled_up, of_up) = jax.vjp(_scaled, gate, f), jax.vjp(_scaled, up, f_up)
    dgate, dup = jax.vjp(silu_gate, scaled, scaled_up)[1](dh)
    (dgate, df), (dup, df_up) = of_gate(dgate), of_up(dup)
    return dgate, dup, df, df_up


def _scaled(y: jax.Array, f: jax.Array) -> jax.Array:
    """The columns of each tile's rows times its factors, in the dtype of y."""
    tiles = y.reshape(len(f), -1, y.shape[-1])
    return (tiles.astype(jnp.float32) * f[:, None]).astype(y.dtype).reshape(y.shape)


_apply.defvjp(_forward, _backward)
