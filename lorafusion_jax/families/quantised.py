"""The `quantization_config` of a model's config.json: which format of `weights.checkpoint_formats` it describes, or how
kernels are packed that reading widens (`weights.packed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafusion_jax.families.hf_config import SHOWN, shortened
from lorafusion_jax.weights.fp8_blocks import BLOCK
from lorafusion_jax.weights.packed import Packed

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


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
    readers = {"bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if not isinstance(method, str) or method not in readers:
        raise UnknownFormat(method[:SHOWN] if isinstance(method, str) else "without quant_method")
    return readers[method](config)


def packed_as(config: Mapping[str, Any], *, has_experts: bool) -> Packed | None:
    """How kernels are packed that reading widens; None: they are not.

    Args:
        has_experts: FP8 blocks are widened in models of experts, and used as they are in others.

    Raises:
        UnknownFormat: a form of GPTQ or AWQ that is not read.

    Example:
        >>> packed_as({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, has_experts=False)
        Packed(method='awq', bits=4, group=128, added=0)
    """
    method = config.get("quant_method")
    if method == "fp8" and has_experts:
        _fp8(config)
        return Packed(method="fp8")
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
    return None


def _group(config: Mapping[str, Any]) -> int:
    size = config.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise UnknownFormat(f"{config['quant_method']} with group_size={shortened(size)}")
    return max(size, 0)


def _bitsandbytes(config: Mapping[str, Any]) -> str:
    if config.get("load_in_8bit") is True:
        return "bitsandbytes-int8"
    _require(config, "bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    _require(config, "bitsandbytes", bnb_4bit_quant_storage=("uint8", None))
    return "bitsandbytes-nf4" if config.get("bnb_4bit_use_double_quant") is True else "bitsandbytes-nf4-single"


def _compressed_tensors(config: Mapping[str, Any]) -> str:
    method = "compressed-tensors"
    _require(config, method, format=("float-quantized", "naive-quantized"))
    _require(config, method, sparsity_config=({}, None), transform_config=({}, None))
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise UnknownFormat(f"{method} without exactly one group of weights")
    _require(weights, method, **FP8, strategy=("channel", "tensor"))
    return "compressed-tensors-fp8"


def _fp8(config: Mapping[str, Any]) -> str:
    _require(config, "fp8", weight_block_size=[BLOCK, BLOCK], fmt=("e4m3", None))
    return "fp8-blocks"


def _require(config: Mapping[str, Any], method: str, **wanted: Any) -> None:
    for key, value in wanted.items():
        if config.get(key) not in (value if isinstance(value, tuple) else (value,)):
            raise UnknownFormat(f"{method} with {key}={shortened(config.get(key))}")
