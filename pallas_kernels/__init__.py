"""LoRA linear layers as pure functions on arrays: fused kernels, many adapters in one call.

The names are looked up when they are used, so that `pallas_kernels.cost` can be imported without jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from pallas_kernels.device import KERNEL_CALLS as KERNEL_CALLS
    from pallas_kernels.device import compiler_options as compiler_options
    from pallas_kernels.device import target as target
    from pallas_kernels.dropout import Dropout as Dropout
    from pallas_kernels.dropout import fold_key as fold_key
    from pallas_kernels.linear.api import lora_linear as lora_linear
    from pallas_kernels.linear.api import multi_lora_linear as multi_lora_linear
    from pallas_kernels.linear.api import multi_lora_linears as multi_lora_linears
    from pallas_kernels.mlp.api import multi_lora_mlp as multi_lora_mlp
    from pallas_kernels.policy import Implementation as Implementation

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
