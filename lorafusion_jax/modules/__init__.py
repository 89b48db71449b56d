"""LoRA layers for Flax: many adapters on one frozen base.

Names are imported on first use. Those of adapters come from `lorafusion_jax.adapters`, which planning uses without jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lorafusion_jax.adapters.init import init_adapter as init_adapter
    from lorafusion_jax.adapters.init import init_bank as init_bank
    from lorafusion_jax.adapters.init import init_leaves as init_leaves
    from lorafusion_jax.adapters.spec import TARGETS as TARGETS
    from lorafusion_jax.adapters.spec import AdapterSpec as AdapterSpec
    from lorafusion_jax.adapters.spec import bank_rank as bank_rank
    from lorafusion_jax.adapters.spec import resolve_targets as resolve_targets
    from lorafusion_jax.modules.apply import apply_lora as apply_lora
    from lorafusion_jax.modules.context import LoRAContext as LoRAContext
    from lorafusion_jax.modules.linear import register_linear as register_linear
    from lorafusion_jax.modules.linen import LinenLoRA as LinenLoRA
    from lorafusion_jax.modules.lora import LoRALinear as LoRALinear
    from lorafusion_jax.modules.lora import lora_mlp as lora_mlp
    from lorafusion_jax.modules.lora import lora_siblings as lora_siblings
    from lorafusion_jax.modules.quantised_base import quantize_base as quantize_base
    from lorafusion_jax.modules.report import lora_report as lora_report
    from lorafusion_jax.modules.session import Session as Session
    from lorafusion_jax.modules.session import SessionStep as SessionStep
    from lorafusion_jax.modules.siblings import share_inputs as share_inputs
    from lorafusion_jax.modules.use import use_adapters as use_adapters
    from lorafusion_jax.modules.weights import adapter_arrays as adapter_arrays
    from lorafusion_jax.modules.weights import adapter_names as adapter_names
    from lorafusion_jax.modules.weights import load_adapter as load_adapter
    from lorafusion_jax.modules.weights import merge_adapter as merge_adapter
    from lorafusion_jax.modules.weights import only_adapter as only_adapter
    from lorafusion_jax.modules.weights import put_adapter_arrays as put_adapter_arrays
    from lorafusion_jax.modules.weights import save_adapter as save_adapter
    from lorafusion_jax.modules.weights import unmerge_adapter as unmerge_adapter
    from lorafusion_jax.optim.per_adapter import active_adapters as active_adapters
    from lorafusion_jax.optim.per_adapter import per_adapter as per_adapter

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
