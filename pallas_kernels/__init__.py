"""LoRA linear layers as pure functions on arrays: fused kernels, many adapters in one call.

The names are looked up when they are used, so that `pallas_kernels.cost` can be imported without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.device import compiler_options as compiler_options
    from pallas_kernels.dropout import Dropout as Dropout
    from pallas_kernels.dropout import fold_key as fold_key
    from pallas_kernels.linear.api import lora_linear as lora_linear
    from pallas_kernels.linear.api import multi_lora_linear as multi_lora_linear
    from pallas_kernels.linear.api import multi_lora_linears as multi_lora_linears
    from pallas_kernels.mlp.api import multi_lora_mlp as multi_lora_mlp
    from pallas_kernels.policy import Implementation as Implementation

_HOMES = {  # name: file
    "Dropout": "dropout",
    "Implementation": "policy",
    "compiler_options": "device",
    "fold_key": "dropout",
    "lora_linear": "linear.api",
    "multi_lora_linear": "linear.api",
    "multi_lora_linears": "linear.api",
    "multi_lora_mlp": "mlp.api",
}
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
