"""Reads rotary embeddings of a config.json: in one piece or by type of layer, in the older and the newer format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lorafusion_jax.families.family import Family
from lorafusion_jax.families.hf_config import HFConfig, RopeValues, parse_part, shortened
from lorafusion_jax.families.read_full_layers import read_full_sizes
from lorafusion_jax.families.rope import Rope, RopeScaling

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"
LAYER_TYPES = (FULL, SLIDING)
_THETA = 10000.0
_NEEDS = {  # of each kind of scaling
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "dynamic": ("factor",),
    "mrope": (),
}
_MAY = {  # besides theta, kind, share, and lengths
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor",),
}
_ALWAYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")


def read_ropes(
    hf: HFConfig, family: Family, head_dim: int, malformed: list[str], unsupported: list[str]
) -> dict[str, Rope | None]:
    """The rope of each type of layer, from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    settings = hf.rope_parameters or hf.rope_scaling or {}
    theta = hf.rope_theta or family.reads.get("rope_theta", _THETA)
    thetas = {FULL: theta, SLIDING: theta}
    if family.scaled_layers == FULL:  # `rope_theta` is that of full layers
        local = family.reads.get("rope_local_base_freq") or family.reads.get("rope_theta", _THETA)
        thetas[SLIDING] = hf.rope_local_base_freq or local
    nested = {key: value for key, value in settings.items() if isinstance(value, dict)}
    if nested:
        if nested.keys() != settings.keys() or not nested.keys() <= {*LAYER_TYPES} or family.scaled_layers != FULL:
            unsupported.append("rope parameters differ between layers")
            return {}
        by_type: Mapping[str, Any] = {name: nested.get(name, {}) for name in LAYER_TYPES}
    elif family.scaled_layers == FULL:
        if settings and (hf.rope_parameters or isinstance(family.reads.get("rope_parameters"), dict)):
            key = "rope_parameters" if hf.rope_parameters else "rope_scaling"
            unsupported.append(f"{key} of all layers together: this family has rope_parameters.{FULL} and .{SLIDING}")
        if settings.get("type") is not None and settings.get("rope_type") is None:
            unsupported.append("rope_scaling.type: this family has rope_scaling.rope_type")  # so in transformers
        by_type = {FULL: settings, SLIDING: {}}
    else:
        by_type = dict.fromkeys(LAYER_TYPES, settings)
    head_dims = {FULL: read_full_sizes(hf, family).get("head_dim"), SLIDING: None}
    return {
        name: _Reader(hf, family, head_dim, head_dims[name], malformed, unsupported).read(values, thetas[name])
        for name, values in by_type.items()
    }


class _Reader:
    """Reads parameters of one type of layer. Problems are added to the lists, once each.

    Args:
        head_dim: of the model.
        other_dim: of this type of layer (None: that of the model).
    """

    def __init__(
        self, hf: HFConfig, family: Family, head_dim: int, other_dim: int | None, malformed: list[str],
        unsupported: list[str],
    ):  # fmt: skip
        self.hf, self.family, self.head_dim, self.channels = hf, family, other_dim or head_dim, other_dim
        self.malformed, self.unsupported = malformed, unsupported

    def read(self, raw: Mapping[str, Any], theta: float) -> Rope | None:
        problems: list[str] = []
        values = parse_part(RopeValues, raw, problems)
        kind = values.rope_type or values.type or "default"
        kind = self.family.meant.get("rope_type", {}).get(kind, kind)
        if kind == "su" or (kind == "yarn" and "short_factor" in raw):
            kind = "longrope"  # its older names
        if kind != "default" and kind not in _NEEDS:
            self._add(self.unsupported, [f"rope_type {shortened(kind)} (known: default, {', '.join(_NEEDS)})"])
            return None
        needs = _NEEDS.get(kind, ())
        missing = [
            key for key in needs if getattr(values, key) is None and not any(key in problem for problem in problems)
        ]
        if missing:
            problems.append(f"rope_type {kind!r} lacks {', '.join(missing)}")
        beta = ("llama_4_scaling_beta",) if "llama_4_scaling_beta" in self.family.meanings else ()
        keys = {*_ALWAYS, *_LENGTHS, *needs, *_MAY.get(kind, ()), *beta, *self.family.known_of_rope}
        others = [key for key, value in raw.items() if key not in keys and value is not None and not problems]
        unread = [f"rope parameter {shortened(key)} of {kind}" for key in others]
        self._add(self.unsupported, unread)
        self._add(self.malformed, problems)
        if kind == "mrope" and "mrope_section" not in self.family.known_of_rope:
            self._add(self.unsupported, ["rope_type 'mrope' of a model of text"])
        channels = self.channels if kind == "proportional" else self._channels(values) or self.channels
        if problems or unread:
            return None
        # Dynamic scaling begins after the model's last position, and no sample is longer.
        unscaled = kind in ("default", "dynamic", "mrope")
        scaling = None if unscaled else self._scaling(kind, values, channels or self.head_dim)
        context, beta = values.original_max_position_embeddings, values.llama_4_scaling_beta or 0.0
        if beta and context is None:
            self._add(self.malformed, ["llama_4_scaling_beta needs original_max_position_embeddings"])
        more: dict[str, Any] = {"query_beta": beta, "query_context": context or 1} if beta else {}
        more |= {"share": values.partial_rotary_factor or 1.0} if kind == "proportional" else {}
        theta = values.rope_theta or theta
        if kind == "dynamic" and values.alpha and "alpha" in self.family.known_of_rope:
            theta *= values.alpha ** (self.head_dim / (self.head_dim - 2))
        return Rope(theta=theta, scaling=scaling, channels=channels, **dict(self.family.rope) | more)

    def _channels(self, values: RopeValues) -> int | None:
        share = values.partial_rotary_factor
        share = self.hf.partial_rotary_factor if share is None else share
        if share is None and self.hf.rotary_dim is not None:
            share = self.hf.rotary_dim / self.head_dim
        every = (self.hf.qk_nope_head_dim or 0) + self.head_dim
        if share is None or share == 1 or (self.family.whole_heads and share * every == self.head_dim):
            return None
        channels = int(self.head_dim * share)
        if "partial_rotary_factor" not in self.family.meanings or self.family.latent:
            self._add(self.unsupported, [f"partial_rotary_factor={share} is not 1"])
        elif channels < 2 or channels % 2:
            self._add(self.unsupported, [f"partial_rotary_factor={share} rotates {channels} channels of a head"])
        return channels

    def _scaling(self, kind: Any, values: RopeValues, channels: int) -> RopeScaling | None:
        longest = self.hf.max_position_embeddings or 2048
        original = values.original_max_position_embeddings or longest
        if self.hf.original_max_position_embeddings is not None:
            original = self.hf.original_max_position_embeddings
        if kind == "proportional":
            return None if values.factor in (None, 1) else RopeScaling(kind="linear", factor=values.factor or 1.0)
        if kind == "linear":
            return RopeScaling(kind=kind, factor=values.factor or 1.0)
        if kind == "llama3":
            low, high = values.low_freq_factor or 1.0, values.high_freq_factor or 4.0
            return RopeScaling(
                kind=kind,
                factor=values.factor or 1.0,
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_positions=original,
            )
        if kind == "yarn":
            return RopeScaling(
                kind=kind,
                factor=values.factor or 1.0,
                original_max_positions=original,
                beta_fast=values.beta_fast or 32.0,
                beta_slow=values.beta_slow or 1.0,
                truncate=True if values.truncate is None else values.truncate,
                attention_factor=_yarn_attention(values),
            )
        short, long = tuple(values.short_factor or ()), tuple(values.long_factor or ())
        for name, factors in (("short_factor", short), ("long_factor", long)):
            if len(factors) != channels // 2:
                self._add(self.malformed, [f"{name} has {len(factors)} numbers, expected {channels // 2}"])
        factor = values.factor or longest / original
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_positions=original,
            short_factors=short,
            long_factors=long,
            attention_factor=values.attention_factor or _longrope_attention(factor, original),
        )

    @staticmethod
    def _add(problems: list[str], new: list[str]) -> None:
        problems += [problem for problem in new if problem not in problems]


def _yarn_attention(values: RopeValues) -> float:
    """Factor of cosines and sines: 0.1 · ln(factor) + 1, or the quotient of two such with mscale."""

    def grow(share: float) -> float:
        factor = values.factor or 1.0
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    if values.attention_factor is not None:
        return values.attention_factor
    if values.mscale and values.mscale_all_dim:
        return grow(values.mscale) / grow(values.mscale_all_dim)
    return grow(1.0)


def _longrope_attention(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
