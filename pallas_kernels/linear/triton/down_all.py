"""x times the A of all adapters, for few rows: several projections of one input in one launch.

The contraction is split over programs, because there are few outputs and all of A is read; XLA adds up the parts with
what follows.

T rows · K in features · C columns: ranks of all adapters side by side · Z parts of the contraction
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.device import interprets, num_sms, target_platform, wide_integers
from pallas_kernels.policy import HALF_TYPES
from pallas_kernels.triton_call import call, dot

TILE = 64  # rows and columns of a program, and in features of a step
MOST_PARTS = 16


def down_all_unsupported_reason(x_TK: jax.Array, as_: Sequence[jax.Array]) -> str | None:
    """Why the kernel does not serve these arrays on this device; None if it does."""
    if target_platform() not in ("gpu", "cuda", "cpu") or wide_integers():
        return "needs an NVIDIA GPU, and counts in 32 bits"
    if str(x_TK.dtype) not in HALF_TYPES or any(a.dtype != x_TK.dtype for a in as_):
        return "wants bfloat16 or float16"
    sizes = (*x_TK.shape, *(a.shape[1] for a in as_))
    return f"wants multiples of {TILE}, not {sizes}" if any(size % TILE for size in sizes) else None


def down_all(x_TK: Float[Array, "T K"], as_: Sequence[Float[Array, "K _"]]) -> tuple[Float[Array, "Z T _"], ...]:
    """Returns parts of x A of each projection, float32; their sum over the first axis is x A.

    Raises:
        NotImplementedError: see `down_all_unsupported_reason`.
    """
    if reason := down_all_unsupported_reason(x_TK, as_):
        raise NotImplementedError(f"down_all by Triton {reason}")
    (T, K), columns = x_TK.shape, [a.shape[1] // TILE for a in as_]
    programs, parts = T // TILE * sum(columns), 1
    # Until there are two programs for each SM; a split leaves each part two steps or more.
    while parts < MOST_PARTS and programs * parts < 2 * num_sms() and K % (4 * parts * TILE) == 0:
        parts *= 2
    steps = K // TILE // parts

    def kernel(x_ref, *refs):
        row, tile, part = (pl.program_id(axis) for axis in range(3))
        rows, first = pl.ds(row * TILE, TILE), 0
        # The arrays of A lie apart and no index selects one, so a program takes the branch of its column tile.
        for a_ref, out_ref, count in zip(refs[: len(as_)], refs[len(as_) :], columns, strict=True):

            @pl.when((tile >= first) & (tile < first + count))
            def _(a_ref=a_ref, out_ref=out_ref, first=first):
                at = pl.ds((tile - first) * TILE, TILE)

                def step(number, total):
                    features = pl.ds((part * steps + number) * TILE, TILE)
                    return total + dot(x_ref[rows, features], a_ref[features, at])

                # Every part has its own place: sums in one place would depend on the order in which programs end.
                out_ref[part, rows, at] = lax.fori_loop(0, steps, step, jnp.zeros((TILE, TILE), jnp.float32))

            first += count

    return tuple(
        call(
            kernel,
            [x_TK, *as_],
            name="down_all",
            grid=(T // TILE, sum(columns), parts),
            out_shape=[jax.ShapeDtypeStruct((parts, T, a.shape[1]), jnp.float32) for a in as_],
            num_warps=4,
            num_stages=4,
            interpret=interprets(),
        )
    )
