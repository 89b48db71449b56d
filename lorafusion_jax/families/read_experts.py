"""The experts of a config.json."""

from __future__ import annotations

from dataclasses import replace

from lorafusion_jax.families.experts import Experts
from lorafusion_jax.families.hf_config import HFConfig, shortened
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.families.table import Family


def read_experts(
    hf: HFConfig, family: Family, activation: Activation, malformed: list[str], unsupported: list[str]
) -> Experts | None:
    """The experts of a model whose family has some."""
    if family.experts is None:
        return None
    count, active = hf.num_experts or 0, hf.num_experts_per_tok or 0
    if not count or not active:
        malformed.append(f"{family.key_of('num_experts')} or num_experts_per_tok is missing")
    elif active > count:
        malformed.append(f"num_experts_per_tok={active} is more than {family.key_of('num_experts')}={count}")
    for key, off in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        value = getattr(hf, key)
        if value not in (None, off):
            unsupported.append(f"{key}={shortened(value)}: layers without experts beside layers with experts")
    if hf.swiglu_alpha not in (None, 1.702):
        unsupported.append(f"swiglu_alpha={hf.swiglu_alpha} (known: 1.702)")
    experts = Experts(
        width=hf.hidden_size or 1,
        inner=hf.moe_intermediate_size or hf.intermediate_size or 1,
        count=count,
        active=active,
        activation=activation,
        limit=hf.swiglu_limit,
        **family.experts,
    )
    if hf.norm_topk_prob is None:
        return experts
    return replace(experts, router=replace(experts.router, normalise=hf.norm_topk_prob))
