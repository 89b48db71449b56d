"""NF4 with double quantisation, as QLoRA and bitsandbytes store it: 4.13 bits a weight.

    W[k, n] ≈ NF4[code] · absmax[block]                     blocks of 64 weights of an output channel
    absmax[block] ≈ DYNAMIC[code] · group[block / 256] + offset

Blocks run through W^T row by row, the order of checkpoints, so a channel may end within a block. Codes and tables are
those of bitsandbytes for the same matrix. A block's scale is the nearest of the table, where bitsandbytes takes the one
beside it for a block in some hundreds. The last bit of the offset, a mean, depends on the order of a sum. On a mesh
blocks' scales follow the rows of W^T (`quantise_rows`), with the same values.

Without double quantisation a block's absmax is a float32: 4.5 bits a weight. jax is imported on use.

NF4 is from QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E), the dynamic map from 8-bit optimizers (Dettmers
et al. 2022, arXiv:2110.02861): both as bitsandbytes stores them, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_DECADES = 7
BLOCK, GROUP = 64, 256


def dynamic_map() -> np.ndarray:
    """256 numbers from -0.993 to 1: seven decades, each with twice as many steps as the one below; 0 and 1 besides."""
    positive = []
    for decade in range(_DECADES):
        edges = _spread(2**decade)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        positive.append(np.float32(10.0 ** (decade + 1 - _DECADES)) * middles)
    positive = np.concatenate(positive)
    return np.sort(np.concatenate([-positive, positive, np.array([0, 1], np.float32)])).astype(np.float32)


def _spread(steps: int) -> np.ndarray:
    """0.1 to 1 in equal steps of float32, each half counted from its own end and rounded once: the map's last bits."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(steps))
    number = np.arange(steps + 1)
    rising = number < (steps + 1) // 2
    return np.where(rising, first + step * number, last - step * (steps - number)).astype(np.float32)


DYNAMIC = dynamic_map()


def borders(values: np.ndarray) -> np.ndarray:
    """Between neighbours: what lies above is nearer to the upper one."""
    return (values[:-1] + values[1:]) / np.float32(2)


def groups_of(in_features: int, out_features: int) -> int:
    """Number of groups of blocks; the last one may be padded."""
    return math.ceil(math.ceil(in_features * out_features / BLOCK) / GROUP)


def quantise(kernel_KN: Any) -> dict[str, Any]:
    """Rounds every weight to the nearest value of its block, and every block's scale to the nearest of its group."""
    import jax.numpy as jnp

    codes, absmax = _codes(kernel_KN)
    offset = _mean(absmax)
    groups = _blocks(absmax - offset, GROUP)
    group_absmax = jnp.max(jnp.abs(groups), axis=1)
    return {
        "codes": codes,
        "absmax": _nearest(_scaled(groups, group_absmax[:, None]), DYNAMIC),
        "group_absmax": group_absmax,
        "offset": offset[None],
    }


def quantise_single(kernel_KN: Any) -> dict[str, Any]:
    """The same codes, and the blocks' scales as they are."""
    codes, absmax = _codes(kernel_KN)
    return {"codes": codes, "absmax": _blocks(absmax, GROUP)}


def quantise_rows(kernel_KN: Any) -> dict[str, Any]:
    """The same codes and scales in arrays that follow the rows of W^T: a mesh can split them between blocks.

    A group of blocks runs over the ends of rows, so its scale stays whole; a block finds it by its number in the whole
    matrix, `first_block` of its row + `block` of its columns. K is a multiple of 64. The numbers that codes stand for
    are arrays, too: on automatic axes a product may hold no constants.
    """
    import jax.numpy as jnp

    in_features, out_features = kernel_KN.shape
    blocks, arrays = in_features // BLOCK, quantise(kernel_KN)
    absmax = arrays["absmax"].reshape(-1)[: out_features * blocks].reshape(out_features, blocks)
    first_block = jnp.arange(out_features, dtype=jnp.int32) * blocks
    numbers = {"code_values": jnp.asarray(NF4), "absmax_values": jnp.asarray(DYNAMIC)}
    block = jnp.arange(blocks, dtype=jnp.int32)
    return arrays | numbers | {"absmax": absmax, "first_block": first_block, "block": block}


def dequantise_rows(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """The kernel [K, N] of any rows and columns of these arrays: the same values as of the whole."""
    import jax.numpy as jnp

    group = (arrays["first_block"][:, None] + arrays["block"]) // GROUP
    absmax = _absmax(arrays["absmax_values"][arrays["absmax"]] * arrays["group_absmax"][group], arrays["offset"])
    codes = arrays["codes"].reshape(*absmax.shape, BLOCK // 2)
    high, low = (arrays["code_values"][code] * absmax[..., None] for code in (codes >> 4, codes & 15))
    return jnp.stack([high, low], axis=-1).astype(dtype).reshape(len(absmax), -1).T


def _absmax(scales: Any, offset: Any) -> Any:
    """The largest magnitude of each block."""
    from jax import lax

    # Rounded before the sum, as bitsandbytes does: compilers would multiply and add in one step.
    return lax.optimization_barrier(scales) + offset


def dequantise(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """The kernel [K, N], multiplied in float32 and rounded once."""
    import jax.numpy as jnp

    scales = jnp.asarray(DYNAMIC)[arrays["absmax"]] * arrays["group_absmax"][:, None]
    absmax = _absmax(scales, arrays["offset"])
    return dequantise_single({"codes": arrays["codes"], "absmax": absmax}, dtype)


def dequantise_single(arrays: Mapping[str, Any], dtype: Any) -> Any:
    """The kernel [K, N] of codes and the blocks' scales."""
    import jax.numpy as jnp

    codes = arrays["codes"]
    size = 2 * codes.size
    code_pairs = _blocks(codes.reshape(-1), BLOCK // 2)
    absmax = arrays["absmax"].reshape(-1)[: len(code_pairs), None]
    high, low = (jnp.asarray(NF4)[code] * absmax for code in (code_pairs >> 4, code_pairs & 15))
    values = jnp.stack([high, low], axis=-1).astype(dtype).reshape(-1)
    return values[:size].reshape(codes.shape[0], 2 * codes.shape[1]).T


def _codes(kernel_KN: Any) -> tuple[Any, Any]:
    """Two codes a byte [N, K / 2], and the largest magnitude of every block."""
    import jax.numpy as jnp

    in_features, out_features = kernel_KN.shape
    values = _blocks(kernel_KN.T.reshape(-1), BLOCK)
    absmax = jnp.max(jnp.abs(values), axis=1)
    codes = _nearest(_scaled(values, absmax[:, None]), NF4).reshape(-1)[: in_features * out_features]
    return ((codes[::2] << 4) | codes[1::2]).reshape(out_features, in_features // 2), absmax


def _blocks(flat: Any, size: int) -> Any:
    """[blocks, size], the last block filled up with zeros."""
    import jax.numpy as jnp

    return jnp.pad(flat, (0, -len(flat) % size)).reshape(-1, size)


def _nearest(x: Any, numbers: np.ndarray) -> Any:
    """The code of the nearest number, the lower of two as near."""
    import jax.numpy as jnp

    # Few borders are compared one after another, all in one pass. A comparison with an array of them is a reduction, of
    # which XLA tried forms on a GPU for more than two minutes where the borders were those of DYNAMIC.
    edges = borders(numbers)
    if len(edges) > len(NF4):
        return jnp.searchsorted(jnp.asarray(edges), x, side="left").astype(jnp.uint8)
    return sum((x > edge).astype(jnp.uint8) for edge in edges)


def _scaled(x: Any, largest: Any) -> Any:
    """x / largest as bitsandbytes divides: by its inverse, and zero where all are."""
    import jax.numpy as jnp

    return x * jnp.where(largest > 0, 1 / largest, 0)


def _mean(x: Any) -> Any:
    """A sum in an order of its own, by halves, so that the result is the same however x lies on devices."""
    import jax.numpy as jnp

    size = 1 << (len(x) - 1).bit_length()
    total = jnp.pad(x, (0, size - len(x)))
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0] / jnp.float32(len(x))
