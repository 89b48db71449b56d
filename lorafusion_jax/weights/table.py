"""Stored weights: how a frozen [K, N] kernel is stored, and how it is dequantised for a product.

To add a kind, add a row to `KINDS`. Other packages can install an entry point of the group
`lorafusion_jax.stored_weights` that loads a `StoredKind`. Never imports jax, because planning needs sizes.

Axes: `K` in features · `N` out features
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from lorafusion_jax.plugins import find, not_known
from lorafusion_jax.weights import int8

GROUP = "lorafusion_jax.stored_weights"
NONE = "none"  # kernels stay plain arrays of `base.dtype`


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """Shape and dtype of one stored array.

    With `mesh.fsdp`, an array of two or more axes is sharded along its first axis that divides; other arrays are
    replicated. So give large arrays two axes.

    Args:
        shape: shape of the whole array.
        dtype: name of the dtype in numpy or ml_dtypes: "int8", "float8_e4m3fn".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def item(self) -> int:
        """Bytes per element."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize

    @property
    def num_bytes(self) -> int:
        return self.item * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKind:
    """A way to store a frozen kernel.

    Args:
        arrays: (K, N) → the stored arrays by name. It must not use jax.
        quantise: kernel [K, N], float32 with the checkpoint's values → the arrays that `arrays` names. It is traced by
            jax, and its result must not depend on the sharding.
        dequantise: (stored arrays, dtype) → kernel [K, N] of this dtype. It is traced by jax, without gradients.

    Example:
        >>> {name: array.num_bytes for name, array in INT8.arrays(64, 32).items()}
        {'values': 2048, 'scales': 128}
    """

    arrays: Callable[[int, int], Mapping[str, ArraySpec]]
    quantise: Callable[[Any], Mapping[str, Any]]
    dequantise: Callable[[Mapping[str, Any], Any], Any]


def _int8_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    return {
        "values": ArraySpec(shape=(in_features, out_features), dtype="int8"),
        "scales": ArraySpec(shape=(out_features,), dtype="float32"),
    }


INT8 = StoredKind(arrays=_int8_arrays, quantise=int8.quantise, dequantise=int8.dequantise)

KINDS: Mapping[str, StoredKind] = {"int8": INT8}


def stored_kind(name: str) -> StoredKind | None:
    """Finds a kind by its name in a job file; None for `none`.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return None if name == NONE else find(GROUP, KINDS, name, StoredKind)


def unknown_stored_kind(name: str) -> str | None:
    """Explains an unknown `base.quantize`; None if the name exists."""
    return not_known(GROUP, {NONE: None, **KINDS}, name)
