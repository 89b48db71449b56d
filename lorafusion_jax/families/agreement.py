"""Keys of a config.json that say one thing: equal, or an error that names both.

A list of layers (`layer_types`, `no_rope_layers`, `mlp_layer_types`) and the interval that stands for it are no such
pair: the list counts, as in transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lorafusion_jax.families.family import LETTERS, Family
from lorafusion_jax.families.hf_config import HARMLESS, shortened

_SPELLINGS = (
    ("dtype", "torch_dtype"),
    ("hidden_act", "hidden_activation"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token", "top_k_experts"),
    ("num_mtp_layers", "num_nextn_predict_layers"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_CONTEXT = "original_max_position_embeddings"
_TYPE = ("rope_type", "type")
_ELSEWHERE = (*_TYPE, "rope_theta", "partial_rotary_factor", "max_position_embeddings")  # compared one by one


def contradictions(raw: Mapping[str, Any], family: Family) -> list[str]:
    """Lists pairs of keys that say one thing and differ.

    Args:
        raw: config.json of a text model.

    >>> contradictions({"dtype": "float16", "torch_dtype": "bfloat16"}, Family(architectures=()))
    ["dtype='float16' and torch_dtype='bfloat16' differ"]
    """
    values = {key: value for key, value in raw.items() if value is not None}
    pairs = [*_spellings(values, family), *_head_sizes(values, family), *_ropes(values, family)]
    letters = "hybrid_override_pattern"
    if isinstance(types := values.get("layers_block_type"), list) and isinstance(values.get(letters), str):
        letter_of = {name: letter for letter, name in LETTERS.items()} | {"mamba": "M", "attention": "*"}
        in_letters = "".join(letter_of.get(str(kind), "?") for kind in types)
        pairs.append((letters, values[letters], "layers_block_type", in_letters))
    return list(dict.fromkeys(
        f"{key}={shortened(a)} and {other}={shortened(b)} differ" for key, a, other, b in pairs if a != b
    ))  # fmt: skip


def outside_text(
    root: Mapping[str, Any], text: Mapping[str, Any], shared: Collection[str], family: Family
) -> list[str]:
    """Lists keys of a multimodal model that its text part has with another value, or should have.

    Args:
        text: its `text_config`.
        shared: keys that count for the text part if it has none.
    """
    keys = [
        key for key in (*family.read_keys, *shared)
        if root.get(key) is not None and key not in HARMLESS and key not in ("architectures", "model_type")
    ]  # fmt: skip
    differing = [key for key in keys if text.get(key) is not None and text[key] != root[key]]
    outside = [key for key in keys if text.get(key) is None and key not in shared]
    return [
        *(f"{key}={shortened(root[key])} and text_config.{key}={shortened(text[key])} differ" for key in differing),
        *(f"{key}={shortened(root[key])} belongs into text_config" for key in outside),
    ]


type _Pairs = Iterator[tuple[str, Any, str, Any]]


def _spellings(values: Mapping[str, Any], family: Family) -> _Pairs:
    """Spellings of one key. One that transformers does not read is compared with the value that counts."""
    canonical, by_meaning = family.canonical(values), defaultdict(list)
    for key, meaning in family.keys.items():
        by_meaning[meaning].append(key)
    for group in (*_SPELLINGS, *by_meaning.values()):
        values_by_key = {key: values[key] for key in group if key in values}
        if values_by_key and not values_by_key.keys() & family.read_keys:
            counting = {key: canonical.get(family.keys.get(key, key)) for key in group if key in family.read_keys}
            values_by_key |= {key: value for key, value in counting.items() if value is not None}
        for other in [*values_by_key][1:]:
            key = next(iter(values_by_key))
            if _meaning(values_by_key[key], family) != _meaning(values_by_key[other], family):
                yield key, values_by_key[key], other, values_by_key[other]


def _meaning(value: Any, family: Family) -> Any:
    if not isinstance(value, str):
        return value
    return family.meant.get("hidden_act", {}).get(value, value).removeprefix("torch.")


def _head_sizes(values: Mapping[str, Any], family: Family) -> _Pairs:
    canonical = family.canonical(values)
    turning, others = canonical.get("qk_rope_head_dim"), canonical.get("qk_nope_head_dim")
    rank = canonical.get("kv_lora_rank") if family.cached_heads else None
    is_cached = isinstance(rank, int) and isinstance(turning, int) and values.get("head_dim") == rank + turning
    if family.latent and "head_dim" in values and not is_cached:
        if not family.whole_heads:
            yield "head_dim", values["head_dim"], "qk_rope_head_dim", turning
        elif isinstance(turning, int) and isinstance(others, int):
            yield "head_dim", values["head_dim"], "qk_nope_head_dim + qk_rope_head_dim", others + turning
    if family.latent and "qk_head_dim" in values and isinstance(turning, int) and isinstance(others, int):
        yield "qk_head_dim", values["qk_head_dim"], "qk_nope_head_dim + qk_rope_head_dim", others + turning
    layers = canonical.get("per_layer_config")
    for number, sizes in layers.items() if isinstance(layers, dict) else ():
        sizes = sizes if isinstance(sizes, dict) else {}
        for root, key in (("global_head_dim", "head_dim"), ("num_global_key_value_heads", "num_key_value_heads")):
            if root in values and (key == "head_dim" or canonical.get("attention_k_eq_v")):
                yield root, values[root], f"per_layer_config.{number}.{key}", sizes.get(key, canonical.get(key))


def _ropes(values: Mapping[str, Any], family: Family) -> _Pairs:
    values = {family.keys.get(key, key): value for key, value in values.items()}
    context = values.get(_CONTEXT, family.reads.get(_CONTEXT))
    table_of = {key: values.get(key) for key in ("rope_parameters", "rope_scaling") if values.get(key)}
    table_of = table_of or {"rope_parameters": family.reads.get("rope_parameters")}
    tables = {key: _by_type(key, table, family) for key, table in table_of.items() if isinstance(table, dict)}
    width, share, head = values.get("rotary_dim"), values.get("partial_rotary_factor"), values.get("head_dim")
    if isinstance(width, int) and isinstance(share, int | float) and isinstance(head, int):
        yield "rotary_dim", width, "partial_rotary_factor · head_dim", int(share * head)
    for name, (where, table) in (entry for by_type in tables.values() for entry in by_type.items()):
        local = name == _SLIDING and family.scaled_layers == _FULL
        outside = (
            ("rope_theta", "rope_local_base_freq" if local else "rope_theta", None),
            ("partial_rotary_factor", "partial_rotary_factor", _share(values, family)),
            ("max_position_embeddings", "max_position_embeddings", None),
            (_CONTEXT, _CONTEXT, context),
            (_CONTEXT, "initial_context_length", None),
        )
        for key, root, default in outside:
            if table.get(key) is not None and (value := values.get(root, default)) is not None:
                yield root, value, f"{where}.{key}", table[key]
        newer, older = (_kind(table.get(key)) for key in _TYPE)
        if newer is not None and older is not None:
            yield f"{where}.rope_type", newer, f"{where}.type", older
    if len(tables) == 2:
        newer, older = tables.values()
        for name in newer.keys() & older.keys():
            (a_key, a), (b_key, b) = newer[name], older[name]
            context = context or values.get("max_position_embeddings")
            if _settings(a, context) != _settings(b, context):
                yield a_key, a, b_key, b
            for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", None)):
                outside = None if family.scaled_layers == _FULL else values.get(key, family.reads.get(key, default))
                if a.get(key) is not None and (value := b.get(key, outside)) is not None:
                    yield f"{a_key}.{key}", a[key], f"{b_key}.{key}", value  # transformers takes the older table alone


def _share(values: Mapping[str, Any], family: Family) -> float | None:
    """The share of a head's channels that rotates, where a key says their number."""
    width, head = values.get("rotary_dim"), values.get("head_dim", family.reads.get("head_dim"))
    return width / head if isinstance(width, int) and isinstance(head, int) and head else None


def _by_type(key: str, table: Mapping[str, Any], family: Family) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Type of layer → where its rope is written, and what is."""
    nested = {name: (f"{key}.{name}", values) for name, values in table.items() if isinstance(values, dict)}
    return nested or dict.fromkeys((_FULL,) if family.scaled_layers == _FULL else (_FULL, _SLIDING), (key, table))


def _kind(name: Any) -> Any:
    return "longrope" if name == "su" else name


def _settings(table: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """What a table says beside theta and share."""
    kind = _kind(next((table[key] for key in _TYPE if table.get(key) is not None), "default"))
    settings = {key: value for key, value in table.items() if value is not None and key not in _ELSEWHERE}
    default = {_CONTEXT: context} if kind != "default" and kind != "linear" else {}
    return default | settings | {"rope_type": kind}
