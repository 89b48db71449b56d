"""Stored weights: how a frozen [K, N] kernel is stored, and how it is dequantised for a product.

To add a kind, add a row to `KINDS`. Other packages can install an entry point of the group
`lorafusion_jax.stored_weights` that loads a `StoredKind`. Never imports jax, because planning needs sizes.

Axes: `K` in features · `N` out features
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.plugins import find, not_known
from lorafusion_jax.weights import fp8, fp8_blocks, int8, nf4

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
        dimensions: which dimension of the kernel each axis follows, a word per axis: "n" out features, "k" in features,
            "k/64" one element for 64 of them, "*" neither. Kinds that say it for every array can be split over a mesh
            of any axes; one array has both "n" and "k".
    """

    shape: tuple[int, ...]
    dtype: str
    dimensions: str | None = None

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def item(self) -> int:
        """Bytes per element."""
        return self.numpy_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.item * math.prod(self.shape)


class StoredKernel(NamedTuple):
    """How one kernel is stored.

    Attributes:
        shape: (K, N).
    """

    kind: StoredKind
    shape: tuple[int, int]

    @property
    def arrays(self) -> Mapping[str, ArraySpec]:
        return self.kind.arrays(*self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKind:
    """A way to store a frozen kernel.

    Args:
        arrays: (K, N) → the stored arrays by name. No jax here.
        quantise: kernel [K, N], float32 with the checkpoint's values → the arrays that `arrays` names. Traced by jax;
            the same input must give the same bytes however it is split over devices.
        dequantise: (stored arrays, dtype) → kernel [K, N] of that dtype. Traced by jax; no gradient flows through it.
            On automatic mesh axes it may hold no constant arrays: store them, with dimensions "*".
        operand: stored arrays → a `pallas_kernels.frozen_weight.QuantisedWeight`, which multiplies by itself. None:
            a layer is dequantised when it runs.
        product_speed: of its products, with all that they need around them, on Hopper: next to those of bfloat16. For
            predictions; measured.
        unsupported_reason: (K, N) → why a kernel of that shape cannot be stored so; None: it can.
        on_mesh: the same values in arrays that can be split over a mesh; None: these can, or none can.
        of_experts: E → how the kernels of E experts are stored, which lie one below the other, [E · K, N], if that is
            not how any kernel is. Its operand is one of `pallas_kernels.experts`.

    Example:
        >>> {name: array.num_bytes for name, array in INT8.arrays(64, 32).items()}
        {'values': 2048, 'scales': 128}
    """

    arrays: Callable[[int, int], Mapping[str, ArraySpec]]
    quantise: Callable[[Any], Mapping[str, Any]]
    dequantise: Callable[[Mapping[str, Any], Any], Any]
    operand: Callable[[Mapping[str, Any]], Any] | None = None
    product_speed: float = 1.0
    unsupported_reason: Callable[[int, int], str | None] = lambda in_features, out_features: None
    on_mesh: StoredKind | None = None
    of_experts: Callable[[int], StoredKind] | None = None

    def of(self, experts: int) -> StoredKind:
        """How it stores a kernel of so many experts; 0: of none."""
        return self if experts == 0 or self.of_experts is None else self.of_experts(experts)


def _int8_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    return {
        "values": ArraySpec(shape=(in_features, out_features), dtype="int8", dimensions="k n"),
        "scales": ArraySpec(shape=(out_features,), dtype="float32", dimensions="n"),
    }


def _fp8_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    return {
        "values": ArraySpec(shape=(out_features, in_features), dtype="float8_e4m3fn", dimensions="n k"),
        "scales": ArraySpec(shape=(out_features,), dtype="float32", dimensions="n"),
    }


def _fp8_block_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    blocks = fp8_blocks.blocks_of(out_features), fp8_blocks.blocks_of(in_features)
    return {
        "values": ArraySpec(shape=(out_features, in_features), dtype="float8_e4m3fn", dimensions="n k"),
        "scales": ArraySpec(shape=blocks, dtype="float32", dimensions=f"n/{fp8_blocks.BLOCK} k/{fp8_blocks.BLOCK}"),
    }


def _nf4_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    groups = nf4.groups_of(in_features, out_features)
    return {
        "codes": ArraySpec(shape=(out_features, in_features // 2), dtype="uint8"),
        "absmax": ArraySpec(shape=(groups, nf4.GROUP), dtype="uint8"),
        "group_absmax": ArraySpec(shape=(groups,), dtype="float32"),
        "offset": ArraySpec(shape=(1,), dtype="float32"),
    }


def _nf4_row_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    blocks = in_features // nf4.BLOCK
    arrays, per_block = _nf4_arrays(in_features, out_features), f"k/{nf4.BLOCK}"
    return {
        "codes": replace(arrays["codes"], dimensions="n k/2"),
        "absmax": ArraySpec(shape=(out_features, blocks), dtype="uint8", dimensions=f"n {per_block}"),
        "group_absmax": replace(arrays["group_absmax"], dimensions="*"),
        "offset": replace(arrays["offset"], dimensions="*"),
        "first_block": ArraySpec(shape=(out_features,), dtype="int32", dimensions="n"),
        "block": ArraySpec(shape=(blocks,), dtype="int32", dimensions=per_block),
        "code_values": ArraySpec(shape=(len(nf4.NF4),), dtype="float32", dimensions="*"),
        "absmax_values": ArraySpec(shape=(len(nf4.DYNAMIC),), dtype="float32", dimensions="*"),
    }


def _nf4_single_arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
    return {
        "codes": ArraySpec(shape=(out_features, in_features // 2), dtype="uint8"),
        "absmax": ArraySpec(shape=(nf4.groups_of(in_features, out_features), nf4.GROUP), dtype="float32"),
    }


def _two_share_a_byte(in_features: int, out_features: int) -> str | None:
    del out_features
    return f"{in_features} in features: two share a byte, so it needs an even number" if in_features % 2 else None


def _blocks_end_with_rows(in_features: int, out_features: int) -> str | None:
    del out_features
    remainder = in_features % nf4.BLOCK
    return f"{in_features} in features: its blocks of {nf4.BLOCK} run over the ends of channels" if remainder else None


@lru_cache
def _int8_of_experts(experts: int) -> StoredKind:
    def arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
        shapes = _int8_arrays(in_features, out_features)
        return shapes | {"scales": ArraySpec(shape=(experts, out_features), dtype="float32")}

    return StoredKind(
        arrays=arrays, quantise=partial(int8.quantise_experts, experts=experts), dequantise=int8.dequantise_experts
    )


@lru_cache
def _fp8_of_experts(experts: int) -> StoredKind:
    def arrays(in_features: int, out_features: int) -> dict[str, ArraySpec]:
        shape = experts * out_features, in_features // experts
        return {
            "values": ArraySpec(shape=shape, dtype="float8_e4m3fn"),
            "scales": ArraySpec(shape=(experts, out_features), dtype="float32"),
        }

    # Products of experts take as long as in bfloat16 (H200, benchmarks/results/experts_h200_2026-11-30).
    return StoredKind(
        arrays=arrays,
        quantise=partial(fp8.quantise_experts, experts=experts),
        dequantise=fp8.dequantise_experts,
        operand=fp8.experts_operand,
    )


INT8 = StoredKind(arrays=_int8_arrays, quantise=int8.quantise, dequantise=int8.dequantise, of_experts=_int8_of_experts)
NF4_ROWS = StoredKind(
    arrays=_nf4_row_arrays,
    quantise=nf4.quantise_rows,
    dequantise=nf4.dequantise_rows,
    unsupported_reason=_blocks_end_with_rows,
)
NF4 = StoredKind(
    arrays=_nf4_arrays,
    quantise=nf4.quantise,
    dequantise=nf4.dequantise,
    unsupported_reason=_two_share_a_byte,
    on_mesh=NF4_ROWS,
)
NF4_SINGLE = StoredKind(
    arrays=_nf4_single_arrays,
    quantise=nf4.quantise_single,
    dequantise=nf4.dequantise_single,
    unsupported_reason=_two_share_a_byte,
)
FP8 = StoredKind(
    arrays=_fp8_arrays,
    quantise=fp8.quantise,
    dequantise=fp8.dequantise,
    operand=fp8.operand,
    # A layer of Llama-3.1-8B's shape with four adapters takes 0.70 of the time, and the predicted products are three
    # quarters of it (H200, benchmarks/results/quantised_layer_h200_2026-11-23b).
    product_speed=1.65,
    of_experts=_fp8_of_experts,
)
FP8_BLOCKS = StoredKind(arrays=_fp8_block_arrays, quantise=fp8_blocks.quantise, dequantise=fp8_blocks.dequantise)

KINDS: Mapping[str, StoredKind] = {
    "fp8": FP8,
    "int8": INT8,
    "nf4": NF4,
    # These two are for checkpoints that come so; see `checkpoint_formats`.
    "fp8_blocks": FP8_BLOCKS,
    "nf4_single": NF4_SINGLE,
}


def stored_kind(name: str) -> StoredKind | None:
    """Finds a kind by its name in a job file; None for `none`.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return None if name == NONE else find(GROUP, KINDS, name, StoredKind)


def check_kernels(name: str, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Whether a kind can store kernels of these shapes (K, N), by their names.

    Raises:
        ConfigError: `base.quantize-shape`.
    """
    kind = stored_kind(name)
    reasons = {} if kind is None else {leaf: kind.unsupported_reason(*shape) for leaf, shape in shapes.items()}
    experts = [leaf for leaf in shapes if any(part in EXPERTS for part in leaf.split("."))]
    if kind is not None and kind.operand is not None and kind.of_experts is None and experts:
        raise ConfigError(
            "base.quantize-experts",
            f"projections of experts cannot be stored as {name}.",
            where="base.quantize",
            why=f"the products of experts read plain weights, and {name} is multiplied as it is stored",
            fix="base.quantize: fp8",
        )
    for leaf, reason in reasons.items():
        if reason is not None:
            raise ConfigError(
                "base.quantize-shape",
                f"{leaf} {list(shapes[leaf])} cannot be stored as {name}.",
                where="base.quantize",
                why=reason,
                fix=f"one of [{', '.join(kind for kind in (NONE, *KINDS) if kind != name)}]",
            )


def unknown_stored_kind(name: str) -> str | None:
    """Explains an unknown `base.quantize`; None if the name exists."""
    return not_known(GROUP, {NONE: None, **KINDS}, name)
