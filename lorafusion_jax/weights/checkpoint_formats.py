"""Checkpoints that come quantised: the tensors of a kernel, and the stored kind that holds exactly their values.

To add a format, add a row to `FORMATS` and recognise its `quantization_config` in `families.quantised`. The tensors of
a kernel are named "STEM.weight" and so on; STEM is that of the unquantised model. No jax.

Axes: `K` in features · `N` out features
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.weights import fp8_blocks, int8, nf4
from lorafusion_jax.weights.nf4 import DYNAMIC, NF4
from lorafusion_jax.weights.table import NONE

Shape = tuple[int, ...]
Tensors = Mapping[str, np.ndarray]
FLOATS = ("F32", "BF16", "F16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def two_sets(directory: Path, indexed: Collection[str]) -> CheckpointError | None:
    """The error of a folder with one file of weights beside an index of others: some programs read one, some the other.

    Args:
        indexed: files that the index names.
    """
    if SINGLE in indexed or not all((directory / name).is_file() for name in (SINGLE, INDEX)):
        return None
    return CheckpointError(
        "model.two-sets",
        f"the folder holds two sets of weights: {SINGLE}, and what {INDEX} names.",
        where=str(directory),
        why="transformers reads the first, other programs the second",
        fix=f"remove {SINGLE}, or {INDEX} with its files",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor of a checkpoint must look like.

    Args:
        dtypes: names in safetensors.
        shapes: the shapes that it may have; empty: any.
        optional: it may be missing.
        read: whether its values are used.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...] = ()
    optional: bool = False
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """How a checkpoint holds a quantised kernel.

    Args:
        kind: name of the stored kind.
        tensors: (K, N) → the tensors next to the one with most bytes, by the end of their names after STEM.
        bulk: name of the stored array whose bytes are those of "STEM.weight".
        bulk_dtype: of "STEM.weight" in safetensors.
        bulk_shape: (K, N) → shape of "STEM.weight".
        transposed: whether "STEM.weight" is the transpose of the stored array; else it holds the same bytes in the
            same order.
        small: (the tensors by the ends of their names, K, N) → the other stored arrays. Raises ValueError with the
            reason if they cannot be used.
    """

    kind: str
    tensors: Callable[[int, int], Mapping[str, TensorSpec]]
    bulk: str
    bulk_dtype: str
    bulk_shape: Callable[[int, int], Shape] = lambda in_features, out_features: (out_features, in_features)
    transposed: bool = False
    small: Callable[[Tensors, int, int], dict[str, np.ndarray]]


def _nf4_tensors(in_features: int, out_features: int, *, double: bool) -> dict[str, TensorSpec]:
    blocks = -(-in_features * out_features // nf4.BLOCK)
    scales = {".weight.absmax": TensorSpec(dtypes=("U8" if double else "F32",), shapes=((blocks,),))}
    if double:
        groups = -(-blocks // nf4.GROUP)
        scales |= {
            ".weight.nested_absmax": TensorSpec(dtypes=("F32",), shapes=((groups,),)),
            ".weight.nested_quant_map": TensorSpec(dtypes=("F32",), shapes=(DYNAMIC.shape,)),
        }
    return scales | {
        ".weight.quant_map": TensorSpec(dtypes=("F32",), shapes=(NF4.shape,)),
        ".weight.quant_state.bitsandbytes__nf4": TensorSpec(dtypes=("U8",)),
    }


def _nf4_state(tensors: Tensors, in_features: int, out_features: int, *, double: bool) -> Mapping[str, Any]:
    """What a kernel says of itself.

    Raises:
        ValueError: it is stored in another way than its format's name says.
    """
    state = json.loads(tensors[".weight.quant_state.bitsandbytes__nf4"].tobytes())
    expected = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "shape": [out_features, in_features]}
    expected |= {"nested_blocksize": nf4.GROUP, "nested_dtype": "float32"} if double else {}
    if not isinstance(state, dict):
        raise ValueError("quant_state is not an object")
    for key, value in expected.items():
        if state.get(key) != value:
            raise ValueError(f"its {key} is {state.get(key)!r}, not {value!r}")
    maps = {".weight.quant_map": NF4} | ({".weight.nested_quant_map": DYNAMIC} if double else {})
    for name, numbers in maps.items():
        if not np.array_equal(tensors[name], numbers):
            raise ValueError(f"its {name.rpartition('.')[2]} holds other numbers than those of bitsandbytes")
    return state


def _nf4(tensors: Tensors, in_features: int, out_features: int) -> dict[str, np.ndarray]:
    offset = float(_nf4_state(tensors, in_features, out_features, double=True)["nested_offset"])
    if not math.isfinite(offset):
        raise ValueError(f"its nested_offset is {offset}")
    return {
        "absmax": _grouped(tensors[".weight.absmax"]),
        "group_absmax": tensors[".weight.nested_absmax"],
        "offset": np.array([offset], np.float32),
    }


def _nf4_single(tensors: Tensors, in_features: int, out_features: int) -> dict[str, np.ndarray]:
    _nf4_state(tensors, in_features, out_features, double=False)
    return {"absmax": _grouped(tensors[".weight.absmax"])}


def _grouped(absmax: np.ndarray) -> np.ndarray:
    return np.pad(absmax, (0, -absmax.size % nf4.GROUP)).reshape(-1, nf4.GROUP)


def _int8(tensors: Tensors, in_features: int, out_features: int) -> dict[str, np.ndarray]:
    del in_features, out_features
    order = tensors.get(".weight_format")
    if order is not None and order.item() != 0:
        raise ValueError(f"its weight_format is {order.item()}, not 0: the weights lie in the order of a matrix unit")
    return {"scales": tensors[".SCB"] * int8.STEP}


_UNREAD = TensorSpec(dtypes=FLOATS, optional=True, read=False)  # rows get scales of their own


def _of_channels(out_features: int) -> TensorSpec:
    return TensorSpec(dtypes=FLOATS, shapes=((out_features, 1), (out_features,), (1,), ()))


def _by_channel(tensors: Tensors, in_features: int, out_features: int, *, scales: str = ".weight_scale"):
    del in_features
    numbers = tensors[scales].astype(np.float32).reshape(-1)
    return {"scales": np.ascontiguousarray(np.broadcast_to(numbers, (out_features,)))}


def _blocks_format(scales: str, **others: TensorSpec):
    """8-bit floats with a scale per block of 128 x 128, in the tensor whose name ends so."""
    return CheckpointFormat(
        kind="fp8_blocks",
        tensors=lambda k, n: {
            scales: TensorSpec(dtypes=FLOATS, shapes=((fp8_blocks.blocks_of(n), fp8_blocks.blocks_of(k)),)),
            **others,
        },
        bulk="values",
        bulk_dtype="F8_E4M3",
        small=lambda tensors, k, n: {"scales": tensors[scales].astype(np.float32)},
    )


def _nf4_format(kind: str, small: Callable[[Tensors, int, int], dict[str, np.ndarray]], *, double: bool):
    """bitsandbytes' nf4, with double quantisation or without."""
    return CheckpointFormat(
        kind=kind,
        tensors=lambda k, n: _nf4_tensors(k, n, double=double),
        bulk="codes",
        bulk_dtype="U8",
        bulk_shape=lambda k, n: (n * k // 2, 1),
        small=small,
    )


FORMATS: Mapping[str, CheckpointFormat] = {
    "bitsandbytes-nf4": _nf4_format("nf4", _nf4, double=True),
    "bitsandbytes-nf4-single": _nf4_format("nf4_single", _nf4_single, double=False),
    "bitsandbytes-int8": CheckpointFormat(
        kind="int8",
        tensors=lambda k, n: {
            ".SCB": TensorSpec(dtypes=("F32",), shapes=((n,),)),
            ".weight_format": TensorSpec(dtypes=("U8",), shapes=((),), optional=True),
        },
        bulk="values",
        bulk_dtype="I8",
        transposed=True,
        small=_int8,
    ),
    "compressed-tensors-fp8": CheckpointFormat(
        kind="fp8",
        tensors=lambda k, n: {".weight_scale": _of_channels(n), ".input_scale": _UNREAD},
        bulk="values",
        bulk_dtype="F8_E4M3",
        small=_by_channel,
    ),
    "compressed-tensors-int8": CheckpointFormat(
        kind="int8",
        tensors=lambda k, n: {".weight_scale": _of_channels(n), ".input_scale": _UNREAD},
        bulk="values",
        bulk_dtype="I8",
        transposed=True,
        small=_by_channel,
    ),
    "compressed-tensors-fp8-blocks": _blocks_format(".weight_scale", **{".input_scale": _UNREAD}),
    "fp8-blocks": _blocks_format(".weight_scale_inv"),
    "fp8-tensors": CheckpointFormat(
        kind="fp8",
        tensors=lambda k, n: {
            ".weight_scale_inv": TensorSpec(dtypes=FLOATS, shapes=((), (1,))),
            ".activation_scale": _UNREAD,
        },
        bulk="values",
        bulk_dtype="F8_E4M3",
        small=partial(_by_channel, scales=".weight_scale_inv"),
    ),
}


def small_arrays(
    form: CheckpointFormat, tensors: Tensors, in_features: int, out_features: int, *, stem: str, where: str
) -> dict[str, np.ndarray]:
    """The stored arrays of a kernel but for the bulk.

    Raises:
        CheckpointError: `model.quantised-otherwise`.
    """
    try:
        return form.small(tensors, in_features, out_features)
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CheckpointError(
            "model.quantised-otherwise",
            f"{stem} is quantised in a way that is not supported.",
            where=where,
            why=str(problem),
            fix="base.model: the model that it was made of, with base.quantize",
        ) from None


def check_stored_as(quantize: str, name: str | None, *, where: str) -> None:
    """Whether a job stores its base as the checkpoint does.

    A checkpoint that comes quantised is used as it is or not at all: rounding once more would add a second error, and
    widening it would lose its point.

    Args:
        quantize: of the job.
        name: of the checkpoint's format; None: it is not quantised.

    Raises:
        ConfigError: `base.quantize-checkpoint`.
    """
    if name is None or quantize == (kind := FORMATS[name].kind):
        return
    form = "as they are" if quantize == NONE else f"as {quantize}"
    raise ConfigError(
        "base.quantize-checkpoint",
        f"this checkpoint comes quantised as {kind}, and the job stores its weights {form}.",
        where=where,
        why="rounding a second time would add another error" if quantize != NONE else "they are not widened on load",
        fix=f"base.quantize: {kind} (--quantize {kind} of generate and chat), or the model that it was made of",
    )
