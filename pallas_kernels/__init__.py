"""LoRA linear layers as pure functions on arrays: fused kernels, many adapters in one call."""

from pallas_kernels.api import lora_linear, multi_lora_linear, multi_lora_linears
from pallas_kernels.backends import Implementation
from pallas_kernels.dropout import Dropout, fold_key

__all__ = ["Dropout", "Implementation", "fold_key", "lora_linear", "multi_lora_linear", "multi_lora_linears"]
