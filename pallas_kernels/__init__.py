"""LoRA linear layers as pure functions on arrays: fused kernels, many adapters in one call.

Its names are imported when they are first used: `cost` serves planning, which does without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_HOMES = {
    "api": ("lora_linear", "multi_lora_linear", "multi_lora_linears"),
    "backends": ("Implementation",),
    "device": ("compiler_options",),
    "dropout": ("Dropout", "fold_key"),
    "mlp": ("multi_lora_mlp",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value  # asked for once
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
