"""Translates a Hugging Face config.json to the fields of a `ModelConfig`, and collects all problems."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorafusion_jax.families.agreement import contradictions, outside_text
from lorafusion_jax.families.experts import Experts, ParallelExperts, Router
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.hf_config import DROPOUTS, OFF, HFConfig, parse_part, shortened, unread_keys
from lorafusion_jax.families.mlp import Activation, Mlp
from lorafusion_jax.families.multimodal import OF_ROOT, SHARED, TEXT, UNCAPPED, text_part
from lorafusion_jax.families.pattern import LayerType, read_pattern
from lorafusion_jax.families.quantised import UnknownFormat, format_name, named, packed_as
from lorafusion_jax.families.read_mixers import read_delta_net, read_latent, read_mixer
from lorafusion_jax.families.read_rope import read_ropes
from lorafusion_jax.families.refused import why_refused
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.families.table import family_named, find_families, known_models
from lorafusion_jax.layout.layer import BESIDE, BLOCK, SHARED_MLP
from lorafusion_jax.weights.packed import Packed

SHARED_NAMES = ("input_linear", "output_linear")
_METHODS = ("greedy", "group_limited_greedy")
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACTIVATIONS: dict[str | None, Activation] = {
    None: "silu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}


def translate(raw: dict[str, Any], malformed: list[str], unsupported: list[str]) -> dict[str, Any] | None:
    """Returns the fields of a `ModelConfig`, or None if a problem was added to one of the lists."""
    root = raw
    raw, wrapper = text_part(root)
    if isinstance(of_mlx := raw.pop("quantization", None), dict):
        raw.setdefault("quantization_config", of_mlx)
    cap = raw.get("final_logit_softcapping") if wrapper in UNCAPPED else None
    if cap is not None:
        raw |= {"final_logit_softcapping": None}
    different = _names_of_whole(root, wrapper)
    name = _family(raw, malformed, different, unsupported)
    if name is None and not malformed and not different and (reason := why_refused(raw)):
        unsupported[:] = [reason]  # what else is unknown here follows from it
        return None
    family = Family(architectures=()) if name is None else family_named(name)
    malformed.clear()
    malformed += different
    if name is not None:
        malformed += contradictions(raw, family)
        if wrapper and root.get(TEXT):
            malformed += outside_text(root, {**root[TEXT], **_of_root(root, wrapper)}, SHARED, family)
    hf = parse_part(HFConfig, family.canonical(raw), malformed)
    malformed += _missing(hf, family, malformed)
    malformed += _unusable_head(hf)
    heads, hidden = hf.num_attention_heads or 0, hf.hidden_size or 0
    kv_heads = hf.num_key_value_heads or heads
    head_dim = hf.head_dim or hidden // max(heads, 1)
    if family.latent:
        head_dim = hf.qk_rope_head_dim or 2  # as in transformers, whatever head_dim says
    if kv_heads and heads % kv_heads:
        malformed.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        unsupported.append(f"head_dim={head_dim} is odd")
    if not head_dim and not malformed:
        malformed.append(f"hidden_size={hidden} is less than num_attention_heads={heads}")
    ropes = read_ropes(hf, family, head_dim, malformed, unsupported)
    pattern = read_pattern(hf, family, ropes, malformed, unsupported)
    numbers = _numbers(hf, family)
    experts = read_experts(hf, family, numbers["activation"], malformed, unsupported)
    delta_net = read_delta_net(hf, family, numbers["activation"], malformed)
    of_mixer = _ACTIVATIONS.get(hf.mamba_hidden_act or hf.hidden_act, "silu")
    mixer = read_mixer(hf, family, of_mixer, malformed, unsupported)
    latent = read_latent(hf, family, numbers["qkv_bias"], malformed, unsupported)
    checkpoint_format, packed = _quantised(hf, family, wrapper, unsupported)
    _refuse_other_options(hf, raw, family, unsupported)
    dropouts = _dropouts(raw, family, malformed)
    if isinstance(cap, int | float):
        dropouts = (*dropouts, ("text_config.final_logit_softcapping", cap))
    for problems in (malformed, unsupported):
        problems[:] = [_in_spelling_of(raw, family, problem) for problem in problems]
    if name is not None:
        _refuse_unread(raw, family, unsupported)
    if name is None or malformed or unsupported:
        return None
    return (
        numbers
        | _types(pattern)
        | {
            "family": name,
            "wrapper": wrapper,
            "vocab_size": hf.vocab_size or 0,
            "output_vocab": _output_vocab(hf),
            "hidden_size": hidden,
            "intermediate_size": _inner(hf, family, experts is None),
            "num_layers": hf.num_hidden_layers or 0,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "checkpoint_format": checkpoint_format,
            "packed": packed,
            "dropouts": dropouts,
            "experts": experts,
            "delta_net": delta_net,
            "mixer": mixer,
            "latent": latent,
            "input_width": hf.hidden_size_per_layer_input or 0,
            "chosen": hf.index_topk,
            "input_vocab": (hf.hidden_size_per_layer_input and hf.vocab_size_per_layer_input) or 0,
        }
    )


def _names_of_whole(root: Mapping[str, Any], wrapper: str) -> list[str]:
    """What the names of a multimodal model contradict."""
    name = root.get("model_type")
    if not wrapper or name in (None, wrapper):
        return []
    return [_different_names(root["architectures"], name)]


def _of_root(root: Mapping[str, Any], wrapper: str) -> dict[str, Any]:
    return {OF_ROOT[wrapper]: root.get(OF_ROOT[wrapper])} if wrapper in OF_ROOT else {}


def _different_names(architectures: object, model_type: object) -> str:
    return (
        f"architectures={shortened(architectures)} and model_type={shortened(model_type)} name different models "
        "(transformers loads by model_type): keep those of these weights"
    )


def _in_spelling_of(raw: Mapping[str, Any], family: Family, problem: str) -> str:
    """A message, with the names that its keys have in this config.json."""
    names = {key: name for name, key in family.keys.items() if name in raw and key not in raw}
    spellings = [f"{key} is {name} here" for key, name in names.items() if re.search(rf"\b{key}\b", problem)]
    return f"{problem} ({', '.join(spellings)})" if spellings else problem


def _family(raw: dict[str, Any], malformed: list[str], different: list[str], unsupported: list[str]) -> str | None:
    names_part = parse_part(
        HFConfig, {key: raw[key] for key in ("architectures", "model_type") if key in raw}, malformed
    )
    if malformed:
        return None
    names = names_part.architectures or []
    families = find_families(names, names_part.model_type)
    if len(families) == 1:
        return families.pop()
    if families:
        different.append(_different_names(names, names_part.model_type))
        return None
    architecture = shortened(", ".join(names)).strip("'") if names else f"model_type {shortened(names_part.model_type)}"
    unsupported.append(f"unknown architecture {architecture} (known: {known_models()})")
    return None


def _missing(hf: HFConfig, family: Family, malformed: list[str]) -> list[str]:
    bad = {problem.partition("=")[0] for problem in malformed}
    missing = [key for key in _COUNTS if getattr(hf, key) is None and key not in bad]
    return [f"{family.key_of(key)} is missing" for key in missing]


def _output_vocab(hf: HFConfig) -> int:
    """Rows of a head that has fewer than the embedding; 0: it has as many."""
    return 0 if hf.output_vocab_size in (None, hf.vocab_size) else hf.output_vocab_size or 0


def _unusable_head(hf: HFConfig) -> list[str]:
    rows = _output_vocab(hf)
    if rows > (hf.vocab_size or rows):
        return [f"output_vocab_size={rows} is more than vocab_size={hf.vocab_size}"]
    if rows and hf.tie_word_embeddings:
        return [f"output_vocab_size={rows} and tie_word_embeddings=True: the embedding has {hf.vocab_size} rows"]
    return []


def _refuse_unread(raw: dict[str, Any], family: Family, unsupported: list[str]) -> None:
    unread = unread_keys(raw, family.read_keys, {*family.known, *family.dropouts, *DROPOUTS})
    unsupported += [f"{key}: this key is not read, and it may change what the model computes" for key in unread]


def _dropouts(raw: Mapping[str, Any], family: Family, malformed: list[str]) -> tuple[tuple[str, float], ...]:
    """Dropout inside the base, which is not applied."""
    defaults: dict[str, Any] = {**dict.fromkeys(DROPOUTS, 0.0), **family.dropouts}
    rates = {key: default if raw.get(key) is None else raw[key] for key, default in defaults.items()}
    rates = {key: rate for key, rate in rates.items() if key in family.dropouts or rate not in OFF}
    wrong = [key for key, rate in rates.items() if type(rate) not in (int, float) or not 0 <= rate < 1]
    malformed += [f"{key}={shortened(rates[key])} is not a number from 0 to 1" for key in wrong]
    return tuple((key, float(rate)) for key, rate in rates.items() if key not in wrong)


def _numbers(hf: HFConfig, family: Family) -> dict[str, Any]:
    """Fields that follow from single keys; those that all models of the family have in common take precedence."""
    biased = bool(hf.attention_bias or hf.use_bias)
    scale = hf.attention_multiplier
    if hf.query_pre_attn_scalar is not None:
        scale = hf.query_pre_attn_scalar**-0.5
    if hf.scale_attn_weights is False:
        scale = 1.0
    numbers = {
        "norm_eps": 1e-6 if hf.rms_norm_eps is None else hf.rms_norm_eps,
        "qk_norm": bool(hf.use_qk_norm),
        "qkv_bias": biased if hf.qkv_bias is None else hf.qkv_bias,
        "o_bias": biased if hf.attention_out_bias is None else hf.attention_out_bias,
        "mlp_bias": bool(hf.mlp_bias or hf.use_bias),
        "tie_embeddings": bool(hf.tie_word_embeddings),
        "max_positions": 2048 if hf.max_position_embeddings is None else hf.max_position_embeddings,
        "activation": _ACTIVATIONS.get(hf.hidden_act, "silu"),
        "attention_scale": scale,
        "attention_soft_cap": hf.attn_logit_softcapping,
        "final_soft_cap": hf.final_logit_softcapping,
        "embedding_scale": 1.0 if hf.embedding_multiplier is None else hf.embedding_multiplier,
        "residual_scale": 1.0 if hf.residual_multiplier is None else hf.residual_multiplier,
        "logit_scale": hf.logit_scale or (1.0 if hf.logits_scaling is None else 1 / hf.logits_scaling),
        "norms": family.parallel if hf.use_parallel_residual else "pre",
        "attention_factors": (hf.attention_in_multiplier or 1.0, hf.attention_out_multiplier or 1.0),
        "mlp_factors": (1.0, 1.0) if hf.mlp_multipliers is None else tuple(hf.mlp_multipliers),
    }
    if hf.key_multiplier is not None:  # of the keys, and so of the scores
        head_dim = hf.head_dim or (hf.hidden_size or 1) // (hf.num_attention_heads or 1)
        numbers["attention_scale"] = hf.key_multiplier * max(head_dim, 1) ** -0.5
    root = {"embedding_scale": (hf.hidden_size or 1) ** 0.5} if family.fields.get("embedding_scale") == "sqrt" else {}
    plain = {"qk_norm": False} if hf.use_qk_norm is False and "use_qk_norm" in family.meanings else {}
    return numbers | dict(family.fields) | root | plain


def _inner(hf: HFConfig, family: Family, dense: bool) -> int:
    """The width of the MLP."""
    inner = hf.intermediate_size or 0
    if "shared_intermediate_size" in family.meanings and dense:
        return hf.shared_intermediate_size or inner
    if hf.block_auto_adjust_ff_dim and "block_auto_adjust_ff_dim" in family.meanings:
        inner, multiple = int((hf.block_ffn_dim_multiplier or 1) * int(2 * inner / 3)), hf.block_multiple_of or 1
        return multiple * -(-inner // multiple)
    return inner


def _types(pattern: tuple[LayerType, ...]) -> dict[str, Any]:
    """One window and one rope for all layers where these say everything, or the type of each."""
    first = pattern[0]
    rope = first.rope or Rope()
    plain = Rope(theta=rope.theta, scaling=rope.scaling, channels=rope.channels)
    if {*pattern} != {LayerType(window=first.window, rope=plain)}:
        return {"pattern": pattern}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rope_channels": rope.channels,
        "sliding_window": first.window,
    }


def _quantised(hf: HFConfig, family: Family, wrapper: str, unsupported: list[str]) -> tuple[str | None, Packed | None]:
    """How the weights come quantised: a name of `weights.checkpoint_formats` if they are used so, and how they are
    packed if reading widens them.
    """
    if hf.quantization_config is None:
        return None, None
    if family.turned or family.joined:
        kernels = "kernels that are [in, out]" if family.turned else "projections that lie in one tensor"
        unsupported.append(_other_form(f"{named(hf.quantization_config)}, with {kernels} in a file"))
        return None, None
    if hf.quantization_config.get("quant_method") == "mxfp4" and "{}" not in family.expert_names[0]:
        return None, None  # reading dequantises them, see `models.expert_files`
    try:
        packed = packed_as(hf.quantization_config, has_experts=family.experts is not None)
        has_experts = hf.num_experts and (hf.enable_moe_block or "enable_moe_block" not in family.meanings)
        if packed is not None and wrapper and has_experts and "{}" not in family.expert_names[0]:
            raise UnknownFormat(f"{named(hf.quantization_config)} of experts that lie in one tensor")
        if packed is not None:
            return None, packed
        if family.experts is not None:
            raise UnknownFormat(f"{named(hf.quantization_config)} of experts")
        return format_name(hf.quantization_config), None
    except UnknownFormat as problem:
        unsupported.append(_other_form(str(problem)))
        return None, None


def _other_form(form: str) -> str:
    return f"quantised weights ({form}): name the model that they were made of, with base.quantize: fp8, int8 or nf4"


def _refuse_other_options(hf: HFConfig, raw: Mapping[str, Any], family: Family, unsupported: list[str]) -> None:
    if hf.mamba_hidden_act not in _ACTIVATIONS:
        unsupported.append(f"mamba_hidden_act {shortened(hf.mamba_hidden_act)}")
    if hf.hidden_act not in _ACTIVATIONS:
        names = ", ".join(name for name in _ACTIVATIONS if name)
        unsupported.append(f"hidden_act {shortened(hf.hidden_act)} (known: {names})")
    has_experts = any(raw.get(key) for key in ("num_experts", "num_local_experts") if key not in family.known)
    if family.experts is None and has_experts:
        unsupported.append("mixture of experts")
    if "attn_output_gate" in family.meanings and not hf.attn_output_gate:
        unsupported.append("attn_output_gate=False")
    if raw.get("is_encoder_decoder"):
        unsupported.append("encoder-decoder")


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
