"""What differs between the layers of one model: mixer, window and rotary embeddings, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lorafusion_jax.families.attention import Sharing
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.hf_config import HFConfig, shortened
from lorafusion_jax.families.read_full_layers import check_full_layers, read_full_sizes, read_sharing
from lorafusion_jax.families.read_rope import CHUNKED, FULL, LAYER_TYPES, LINEAR, SLIDING
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.layout.layer import Half

_OLDER = {"attention": FULL, "mamba": LINEAR, "conv": LINEAR}  # spellings of published files
DENSE, SPARSE = "dense", "sparse"  # of `mlp_layer_types`
# Types of layers of one half.
ALONE: dict[str, Half] = {"mlp": "mlp", "moe": "mlp", FULL: "attention", LINEAR: "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType:
    """What may differ between the layers of a model.

    Args:
        window: rows that a query sees (None: all earlier ones of its sample).
        rope: rotary embeddings (None: none).
        chunk: see `families.attention.Attention`.
        linear: a gated delta net instead of attention.
        dense: an MLP in a model of experts.
        head_dim, kv_heads: of attention, where they are not those of the model (None: they are).
        k_is_v, sharing: see `families.attention.Attention`.
        wide: an MLP of twice the width.
        only: the half that the layer has (None: both).
    """

    window: int | None = None
    rope: Rope | None = None
    chunk: int | None = None
    linear: bool = False
    dense: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    k_is_v: bool = False
    sharing: Sharing = "none"
    wide: bool = False
    only: Half | None = None


def read_pattern(
    hf: HFConfig, family: Family, ropes: Mapping[str, Rope | None], malformed: list[str], unsupported: list[str]
) -> tuple[LayerType, ...]:
    """The type of each layer of a config.json."""
    count = hf.num_hidden_layers or 0
    names = _layer_types(hf, family, count)
    if family.mixer is not None:
        names = [_OLDER.get(name, name) for name in names]
    turns = _turns(hf, family, count)
    unsaid = hf.position_embedding_type != "rope" and "position_embedding_type" in family.meanings
    table = hf.rope_parameters or hf.rope_scaling or {}
    unsaid |= family.rotated == "unless null" and hf.rope_theta is None and table.get("rope_theta", 0) is None
    if family.rotated == "none" or unsaid:
        turns = [False] * count
    if family.rotated.startswith("windows"):
        every = family.rotated == "windows, if any" and hf.sliding_window is None
        turns = [every or name == SLIDING for name in names]
    per_layer = (("layer_types", names), ("no_rope_layers", turns), ("mlp_layer_types", _dense(hf, family, count)))
    for key, values in per_layer:
        if len(values) != count:
            malformed.append(f"{key} has {len(values)} entries, and there are {count} layers")
    if isinstance(hf.sliding_window_pattern, str) and hf.layer_types is None and hf.sliding_window is not None:
        unsupported.append(f"sliding_window_pattern={shortened(hf.sliding_window_pattern)} without layer_types")
    readable = (*LAYER_TYPES, LINEAR) if family.delta_net is not None or family.mixer is not None else LAYER_TYPES
    readable = (FULL, CHUNKED) if "attention_chunk_size" in family.meanings else readable
    alone: dict[str, Half] = ALONE if family.one_half else {}
    readable = (*readable, *(name for name in alone if name not in readable))
    if "mlp_layer_types" in family.meanings:
        unsupported += _unread_mlp_types(hf, followed="index_topk" in family.meanings)
    unknown = [name for name in dict.fromkeys(names) if name not in readable]
    unsupported += [f"layers of type {shortened(name)} (known: {', '.join(readable)})" for name in unknown]
    if SLIDING in names and hf.sliding_window is None:
        by = "the family has" if hf.layer_types is None else "layer_types names"
        malformed.append(f"sliding_window is missing, and {by} layers of {SLIDING}")
    if CHUNKED in names and hf.attention_chunk_size is None:
        malformed.append(f"attention_chunk_size is missing, and there are layers of {CHUNKED}")
    windows = {SLIDING: hf.sliding_window}
    full = [number for number, name in enumerate(names) if name == FULL]
    check_full_layers(hf, family, full, len(names), unsupported)
    sizes = {FULL: read_full_sizes(hf, family)}
    sharing = read_sharing(hf, family, names, unsupported)
    types = zip(names, turns, _dense(hf, family, count), sharing, strict=False)
    return tuple(
        LayerType(
            window=windows.get(name),
            rope=ropes.get(FULL if name == CHUNKED else name) if turn else _unturned(hf, family),
            chunk=hf.attention_chunk_size if name == CHUNKED else None,
            linear=name == LINEAR,
            dense=dense or (family.one_half and name != "moe"),
            only=alone.get(name),
            sharing=shares,
            wide=shares == "reads" and bool(hf.use_double_wide_mlp),
            **sizes.get(name, {}),
        )
        for name, turn, dense, shares in types
    )


def _layer_types(hf: HFConfig, family: Family, count: int) -> list[str]:
    reads, window = family.meanings, hf.sliding_window
    if family.period and hf.layer_types is None:
        return [family.period[number % len(family.period)] for number in range(count)]
    if family.delta_net is not None and hf.layer_types is None:
        every = hf.full_attention_interval or min(4, count)  # without the key as in OLMo hybrid
        return [FULL if (number + 1) % every == 0 else LINEAR for number in range(count)]
    if family.fields.get("mixer_beside"):
        return [FULL] * count
    if family.mixer is not None and hf.layer_types is None:
        full = hf.attn_layer_indices if "attn_layer_indices" in reads else hf.full_attn_idxs
        every = family.mixer == "convolution" and full is None  # so in transformers
        return [FULL if every or number in (full or ()) else LINEAR for number in range(count)]
    every_nth = isinstance(family.windows, int)  # these layers have a window, whatever the file says of its size
    off = (window is None and not every_nth) or ("use_sliding_window" in reads and not hf.use_sliding_window)
    if hf.layer_types is not None and "layer_types" in reads:
        return [FULL if off and name == SLIDING and "use_sliding_window" in reads else name for name in hf.layer_types]
    if family.windows == "chunks":
        return [CHUNKED if turns else FULL for turns in _turns(hf, family, count)]
    if off or family.windows == "never":
        return [FULL] * count
    if isinstance(hf.sliding_window_pattern, str):  # refused by `read_pattern`
        return [FULL] * count
    if family.windows == "all":
        return [SLIDING] * count
    if family.windows == "switched":
        first = hf.max_window_layers or 0
        return [SLIDING if number >= first else FULL for number in range(count)]
    if family.windows == "first":
        first = hf.max_window_layers or 0
        return [SLIDING if number % 2 == 0 and number < first else FULL for number in range(count)]
    if family.windows == "unrotated":
        return [FULL if turns else SLIDING for turns in _turns(hf, family, count)]
    every = hf.sliding_window_pattern or family.windows
    return [FULL if (number + 1) % every == 0 else SLIDING for number in range(count)]


def _unturned(hf: HFConfig, family: Family) -> Rope | None:
    """What stands for the rotary embeddings of layers without them: factors of queries, if there are some."""
    if "attn_scale" not in family.meanings or not hf.attn_temperature_tuning:
        return None
    return Rope(share=0.0, query_beta=hf.attn_scale or 0.0, query_context=hf.floor_scale or 1, query_offset=1)


def _turns(hf: HFConfig, family: Family, count: int) -> list[bool]:
    """Whether q and k of each layer rotate."""
    listed = hf.no_rope_layers is not None and (hf.no_rope_layers or family.windows != "chunks")  # so in transformers
    if hf.no_rope_layers is not None and listed and "no_rope_layers" in family.meanings:
        return [bool(turns) for turns in hf.no_rope_layers]
    every = hf.no_rope_layer_interval if "no_rope_layer_interval" in family.meanings else None
    return [every is None or (number + 1) % every != 0 for number in range(count)]


def _unread_mlp_types(hf: HFConfig, *, followed: bool) -> list[str]:
    """Lists what transformers does not follow in families with a list of MLPs.

    Args:
        followed: whether it follows `first_k_dense_replace` where there is no list.
    """
    if hf.mlp_layer_types is None:
        first = hf.first_k_dense_replace
        return [] if first == 1 or followed else [f"first_k_dense_replace={first}, and mlp_layer_types is missing"]
    others = [name for name in dict.fromkeys(hf.mlp_layer_types) if name not in (DENSE, SPARSE)]
    return [f"mlp_layer_types of {shortened(name)} (known: {DENSE}, {SPARSE})" for name in others]


def _dense(hf: HFConfig, family: Family, count: int) -> list[bool]:
    """Whether each layer has an MLP in place of experts."""
    if family.experts is None:
        return [False] * count
    if hf.mlp_layer_types is not None:
        return [name == DENSE for name in hf.mlp_layer_types]
    if hf.moe_layers is not None:
        return [number not in hf.moe_layers for number in range(count)]
    first, every, others = hf.first_k_dense_replace or 0, hf.decoder_sparse_step or 1, hf.mlp_only_layers or []
    return [number < first or number in others or (number + 1) % every != 0 for number in range(count)]
