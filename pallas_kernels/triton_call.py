"""What the Triton kernels share: the call, float32 products, the keep mask of a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cost import Cost
from pallas_kernels.device import has_fp8_products, interprets
from pallas_kernels.dropout import BLOCK, WORDS
from pallas_kernels.exact import precision_of


@jax.custom_jvp
def first_order(arrays: Any) -> Any:
    """Returns the arrays. Kernels have no derivatives of their own: who asks for one gets an error that says more."""
    return arrays


@first_order.defjvp
def _jvp_rule(primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        "the Triton kernels have first derivatives in reverse mode only (jax.grad, jax.vjp): for second derivatives, "
        'jax.jvp, jax.hessian or jax.linearize pass implementation="xla"'
    )


def call(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    flops: int = 0,
    in_place: bool = False,
) -> Any:
    """Runs a kernel over whole arrays; its program slices them itself.

    Args:
        flops: for XLA's scheduler, with the bytes of all operands and results.
        in_place: the result takes the memory of the first operand and holds it where the kernel writes nothing.
    """
    moved = [*operands, *jax.tree.leaves(out_shape)]
    axes = jax.typeof(operands[0]).manual_axis_type  # inside shard_map: results vary over the mesh as x and dY do
    out_shape = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=axes), out_shape)
    cost = Cost(flops=flops, bytes=sum(array.size * array.dtype.itemsize for array in moved))
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
        cost_estimate=cost.estimate(),
        input_output_aliases={0: 0} if in_place else {},
    )(*first_order(tuple(operands)))


def dot(lhs: jax.Array, rhs: jax.Array, *, trans_lhs: bool = False, trans_rhs: bool = False) -> jax.Array:
    """Multiplies two tiles with float32 accumulation; float32 tiles without rounding to tf32."""
    return plt.dot(lhs, rhs, trans_a=trans_lhs, trans_b=trans_rhs, precision=precision_of(lhs.dtype))


def dot_8bit(lhs: jax.Array, rhs: jax.Array, acc: jax.Array) -> jax.Array:
    """acc + lhs rhs^T of e4m3 tiles [rows, depth] and [columns, depth]."""
    if interprets():  # the same values in a type that a CPU multiplies
        return acc + dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32), trans_rhs=True)
    from pallas_kernels.fp8_dot import fp8_dot

    return fp8_dot(lhs, rhs, acc)


def has_dot_8bit() -> bool:
    """Whether `dot_8bit` serves: on sm_89 and newer, and where kernels are interpreted."""
    try:
        import pallas_kernels.fp8_dot  # noqa: F401
    except (ImportError, AttributeError):  # another version of jax
        return interprets()
    return interprets() or has_fp8_products()


def keep_tile(bits_ref: Any, row0: jax.Array, col0: jax.Array, rows: int, columns: int) -> jax.Array:
    """Loads the keep mask of a tile that does not straddle two 256-column blocks.

    One load of the words, spread by broadcasting: six times faster than every element fetching its own word.
    """
    words = bits_ref[pl.ds(row0, rows), col0 // BLOCK, :]
    shape = (rows, columns // WORDS, WORDS)
    shift = lax.rem(col0, BLOCK) // WORDS + lax.broadcasted_iota(jnp.int32, shape, 1)
    words = jnp.broadcast_to(words[:, None, :], shape)
    return (((words >> shift.astype(jnp.uint32)) & np.uint32(1)) != np.uint32(0)).reshape(rows, columns)
