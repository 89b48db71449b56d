"""The `quantization_config` of a model's config.json: which format of `weights.checkpoint_formats` it describes, or how
kernels are packed that reading widens (`weights.packed`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorafusion_jax.families.hf_config import SHOWN, shortened
from lorafusion_jax.readable import SETTINGS, read_text
from lorafusion_jax.weights.fp8_blocks import BLOCK
from lorafusion_jax.weights.packed import Packed

COMPRESSED = "compressed-tensors"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


class UnknownFormat(ValueError):
    """Says what is not supported."""


def format_name(config: Mapping[str, Any]) -> str:
    """Names the format.

    Raises:
        UnknownFormat: checkpoints of this kind are not read.

    Example:
        >>> format_name({"quant_method": "fp8", "weight_block_size": [128, 128]})
        'fp8-blocks'
    """
    method = config.get("quant_method")
    readers = {"bitsandbytes": _bitsandbytes, COMPRESSED: _compressed_tensors, "fp8": _fp8}
    if not isinstance(method, str) or method not in readers:
        raise UnknownFormat(named(config))
    return readers[method](config)


def named(config: Mapping[str, Any]) -> str:
    """What a format is called.

    >>> named({"quant_method": "modelopt", "quant_algo": "NVFP4"}), named({"group_size": 64, "bits": 4})
    ('modelopt, NVFP4', 'MLX, 4 bits')
    """
    method, kind = config.get("quant_method"), config.get("quant_algo")
    if not isinstance(method, str):
        return f"MLX, {config['bits']} bits" if {"bits", "group_size"} <= config.keys() else "without quant_method"
    return f"{method}, {kind}"[:SHOWN] if isinstance(kind, str) else method[:SHOWN]


def beside_config(file: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` that ModelOpt writes into a file beside a config.json that has none.

    Without `quant_algo` only caches are quantised, and weights are as they were.
    """
    if raw.get("quantization_config") is not None:
        return {}
    try:
        of_modelopt = json.loads(read_text(file.parent / "hf_quant_config.json", SETTINGS))["quantization"]
        is_of_weights = of_modelopt["quant_algo"] is not None
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    return {"quantization_config": {"quant_method": "modelopt"} | of_modelopt} if is_of_weights else {}


def packed_as(config: Mapping[str, Any], *, has_experts: bool) -> Packed | None:
    """How kernels are packed that reading widens; None: they are not.

    Args:
        has_experts: 8-bit numbers with scales are widened in models of experts, and used as they are in others.

    Raises:
        UnknownFormat: a form of these methods that is not read.

    Example:
        >>> packed_as({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, has_experts=False)
        Packed(method='awq', bits=4, group=128, added=0, symmetric=False, scales='.weight_scale_inv', dtype='F8_E4M3')
    """
    method = config.get("quant_method")
    if method == "fp8" and has_experts:
        _require(config, "fp8", weight_block_size=[BLOCK, BLOCK], fmt=("e4m3", None))
        return Packed(method="scaled")
    if method == "gptq":
        _require(config, "gptq", bits=(2, 4, 8), pack_dtype=("int32", None), is_marlin_format=(False, None))
        names = {name for key in ("checkpoint_format", "format") if (name := config.get(key)) is not None}
        if not names <= {"gptq", "gptq_v2"} or len(names) > 1:
            raise UnknownFormat(f"gptq with checkpoint_format={shortened(sorted(map(str, names)))}")
        rules = config.get("dynamic") or {}
        if not isinstance(rules, dict) or any(not str(rule).startswith("-") for rule in rules):
            raise UnknownFormat("gptq with dynamic, other settings for some layers")
        return Packed(method="gptq", bits=int(config["bits"]), group=_group(config), added=int("gptq_v2" not in names))
    if method == "awq":
        _require(config, "awq", bits=4, version=("gemm", "GEMM", None), zero_point=(True, None))
        return Packed(method="awq", bits=4, group=_group(config))
    return _compressed_as(config, has_experts=has_experts) if method == COMPRESSED else None


def _compressed_as(config: Mapping[str, Any], *, has_experts: bool) -> Packed | None:
    stored, weights = _group_of_weights(config)
    if stored == "pack-quantized":
        _require(weights, COMPRESSED, type=("int", None), num_bits=(2, 4, 8), strategy=("group", "channel"))
        by_group = weights["strategy"] == "group"
        group = _group(weights, COMPRESSED) if by_group else 0
        symmetric = weights.get("symmetric") is not False
        return Packed(method="pack-quantized", bits=int(weights["num_bits"]), group=group, symmetric=symmetric)
    if not has_experts:
        return None
    form = _compressed_tensors(config)
    return Packed(
        method="scaled",
        group=BLOCK if form == "compressed-tensors-fp8-blocks" else 0,
        scales=".weight_scale",
        dtype="I8" if form == "compressed-tensors-int8" else "F8_E4M3",
    )


def _group(config: Mapping[str, Any], method: str = "") -> int:
    size = config.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise UnknownFormat(f"{method or config['quant_method']} with group_size={shortened(size)}")
    return max(size, 0)


def _bitsandbytes(config: Mapping[str, Any]) -> str:
    if config.get("load_in_8bit") is True:
        return "bitsandbytes-int8"
    _require(config, "bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    _require(config, "bitsandbytes", bnb_4bit_quant_storage=("uint8", None))
    return "bitsandbytes-nf4" if config.get("bnb_4bit_use_double_quant") is True else "bitsandbytes-nf4-single"


def _group_of_weights(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(how compressed-tensors stores the weights, what it says of their numbers)"""
    _require(config, COMPRESSED, sparsity_config=({}, None), transform_config=({}, None))
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise UnknownFormat(f"{COMPRESSED} without exactly one group of weights")
    stored = group.get("format") or config.get("format")
    return stored if isinstance(stored, str) else "", weights


def _compressed_tensors(config: Mapping[str, Any]) -> str:
    stored, weights = _group_of_weights(config)
    if stored == "int-quantized":
        _require(weights, COMPRESSED, **INT8, strategy=("channel", "tensor"))
        return "compressed-tensors-int8"
    _require({"format": stored}, COMPRESSED, format=("float-quantized", "naive-quantized"))
    _require(weights, COMPRESSED, **FP8, strategy=("channel", "tensor", "block"))
    if weights["strategy"] == "block":
        _require(weights, COMPRESSED, block_structure=([BLOCK, BLOCK],))
        return "compressed-tensors-fp8-blocks"
    return "compressed-tensors-fp8"


def _fp8(config: Mapping[str, Any]) -> str:
    of_tensors = config.get("weight_block_size", 0) is None  # without the key, programs take it for either
    _require(config, "fp8", weight_block_size=None if of_tensors else [BLOCK, BLOCK], fmt=("e4m3", None))
    return "fp8-tensors" if of_tensors else "fp8-blocks"


def _require(config: Mapping[str, Any], method: str, **wanted: Any) -> None:
    for key, value in wanted.items():
        if config.get(key) not in (value if isinstance(value, tuple) else (value,)):
            raise UnknownFormat(f"{method} with {key}={shortened(config.get(key))}")
