"""The `quantization_config` of a model's config.json: which format of `weights.checkpoint_formats` it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafusion_jax.families.hf_config import SHOWN, shortened
from lorafusion_jax.weights.fp8_blocks import BLOCK

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
