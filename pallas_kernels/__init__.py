"""LoRA linear layers as pure functions on arrays: fused kernels, many adapters in one call."""

from pallas_kernels.api import lora_linear, multi_lora_linear, multi_lora_linears
from pallas_kernels.backends import Implementation
from pallas_kernels.device import compiler_options
from pallas_kernels.dropout import Dropout, fold_key
from pallas_kernels.mlp import multi_lora_mlp

__all__ = [
    "Dropout",
    "Implementation",
    "compiler_options",
    "fold_key",
    "lora_linear",
    "multi_lora_linear",
    "multi_lora_linears",
    "multi_lora_mlp",
]
