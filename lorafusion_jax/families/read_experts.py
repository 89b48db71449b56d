"""The experts of a config.json."""

from __future__ import annotations

from dataclasses import replace

from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.hf_config import HFConfig, shortened
from lorafusion_jax.families.mlp import Activation, Mlp
from lorafusion_jax.families.parallel_experts import ParallelExperts
from lorafusion_jax.layout.layer import BESIDE, BLOCK, SHARED_MLP

SHARED_NAMES = ("input_linear", "output_linear")
_METHODS = ("greedy", "group_limited_greedy")


def read_experts(
    hf: HFConfig, family: Family, activation: Activation, malformed: list[str], unsupported: list[str]
) -> Experts | None:
    """The experts of a model whose family has some."""
    if family.experts is None or ("enable_moe_block" in family.meanings and not hf.enable_moe_block):
        return None
    if "shared_intermediate_size" in family.meanings and not hf.num_experts:
        return None
    if family.one_half and "moe" not in (hf.layer_types or ()):
        return None
    count, active = hf.num_experts or 0, hf.num_experts_per_tok or 0
    if not count or not active:
        malformed.append(f"{family.key_of('num_experts')} or {family.key_of('num_experts_per_tok')} is missing")
    elif active > count:
        malformed.append(
            f"{family.key_of('num_experts_per_tok')}={active} is more than {family.key_of('num_experts')}={count}"
        )
    if hf.topk_method not in (None, *_METHODS):
        unsupported.append(f"topk_method={shortened(hf.topk_method)} (known: {', '.join(_METHODS)})")
    if hf.swiglu_alpha not in (None, 1.702):
        unsupported.append(f"swiglu_alpha={hf.swiglu_alpha} (known: 1.702)")
    kind = ParallelExperts if "enable_moe_block" in family.meanings else Experts
    if kind is ParallelExperts and hf.moe_intermediate_size is None:
        malformed.append("moe_intermediate_size is missing")
    experts = kind(
        width=hf.hidden_size or 1,
        inner=hf.moe_intermediate_size or hf.intermediate_size or 1,
        count=count,
        active=active,
        activation=activation,
        limit=hf.swiglu_limit,
        **family.experts,
    )
    router = _router(hf, experts.router, active)
    malformed += _unusable_groups(router, count, active)
    return replace(experts, router=router, shared=_shared(hf, family, experts))


def _router(hf: HFConfig, router: Router, active: int) -> Router:
    normalise = active > 1 if router.normalise == "several" else router.normalise
    return replace(
        router,
        correction=router.correction and hf.use_expert_bias is not False,
        normalise=normalise if hf.norm_topk_prob is None else hf.norm_topk_prob,
        scale=router.scale if hf.routed_scaling_factor is None else hf.routed_scaling_factor,
        groups=1 if hf.topk_method == "greedy" else hf.n_group or 1,
        top_groups=1 if hf.topk_method == "greedy" else hf.topk_group or 1,
    )


def _unusable_groups(router: Router, count: int, active: int) -> list[str]:
    groups, best = router.groups, router.top_groups
    if groups == 1 and best == 1:
        return []
    if count % groups or count // groups < 2:
        return [f"n_group={groups} does not cut {count} experts into equal groups of two or more"]
    if best > groups or best * (count // groups) < active:
        return [f"topk_group={best} groups of {groups} cannot have num_experts_per_tok={active} experts"]
    return []


def _shared(hf: HFConfig, family: Family, experts: Experts) -> Mlp | None:
    """The MLP beside the experts; its width is given, or a number of experts."""
    if hf.shared_intermediate_size and experts.module == BLOCK:
        return Mlp(
            width=experts.width, inner=hf.shared_intermediate_size, activation=experts.activation, fused=True,
            names=SHARED_NAMES, module=f"{BLOCK}.{SHARED_MLP}",
        )  # fmt: skip
    if hf.moe_shared_expert_intermediate_size:
        return Mlp(
            width=experts.width, inner=hf.moe_shared_expert_intermediate_size, activation=experts.activation,
            gated=experts.gated, names=family.fields["mlp_names"], module=f"{experts.module}.shared_experts",
        )  # fmt: skip
    if family.shared_expert:
        return Mlp(width=experts.width, inner=experts.inner, activation=experts.activation, module=family.shared_expert)
    inner = hf.shared_expert_intermediate_size or (hf.n_shared_experts or 0) * experts.inner
    if not inner:
        return None
    module = BESIDE[0 if hf.shared_expert_intermediate_size is None else 1]
    return Mlp(width=experts.width, inner=inner, activation=experts.activation, module=module)
