"""Attention whose queries, keys and values come from low-rank latents (MLA). `models.latent_attention` executes it.

D model width · H heads · P channels of a head without positions · R channels with rotary positions · V value width
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lorafusion_jax.families.attention import MODULE
from lorafusion_jax.families.mechanism import Mixer
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.layout.layer import Linear, Norm, SavedTensor

LATENTS = "latents"  # checkpoint name


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Mixer):
    """o_proj(attention(q, k, v)) with q = q_b(norm(q_a x)) and (k, v) = kv_b(norm(kv_a x)).

    Each head's q and k have P channels without positions and R with rotary ones; those of k come from kv_a itself and
    are the same in all heads.

    Args:
        width: D.
        q_rank: width of the latent of q (None: q_proj makes q of x).
        kv_rank: width of the latent of k and v.
        plain_dim, rotary_dim, value_dim: P, R and V.
        mscale: with scaled rotary frequencies, q and k both grow by 1 + 0.1 · mscale · ln(factor).
        bias: whether q_a, kv_a and o have biases.
        interleaved: whether the two channels of a rotating pair are neighbours.
    """

    width: int
    heads: int
    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    mscale: float = 0.0
    rope: Rope | None = None
    bias: bool = False
    interleaved: bool = True
    eps: float = 1e-6
    module: ClassVar[str] = MODULE
    window: ClassVar[None] = None
    soft_cap: ClassVar[None] = None
    sinks: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        """Factor of the scores: growth² / √(P + R)."""
        scaling = None if self.rope is None else self.rope.scaling
        growth = 1.0 if scaling is None or scaling.factor <= 1 else 1 + 0.1 * self.mscale * math.log(scaling.factor)
        return self.score_dim**-0.5 * growth**2

    @property
    def score_dim(self) -> int:
        """P + R"""
        return self.plain_dim + self.rotary_dim

    @property
    def head_dim(self) -> int:
        """Width of q, k and v in the kernels of attention, which have one for all: the others end in zeros."""
        return max(self.score_dim, self.value_dim)

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        down = self.kv_rank + self.rotary_dim
        kv_b = self._linear("kv_b_proj", "kv_b", self.kv_rank, self.heads * (self.plain_dim + self.value_dim))
        scores = self.heads * self.score_dim
        first = ("q_proj", scores, False) if self.q_rank is None else ("q_a_proj", self.q_rank, self.bias)
        name, size, bias = first
        return (
            self._linear(name, "latents", self.width, size, bias=bias),
            self._linear("kv_a_proj_with_mqa", "latents", self.width, down, bias=self.bias),
            *(() if self.q_rank is None else (self._linear("q_b_proj", "q_b", self.q_rank, scores),)),
            kv_b,
            self._linear("o_proj", "o", self.heads * self.value_dim, self.width, bias=self.bias),
        )

    @property
    def norms(self) -> tuple[Norm, ...]:
        widths = {"q_a_layernorm": self.q_rank, "kv_a_layernorm": self.kv_rank}
        return self._norms({name: width for name, width in widths.items() if width})

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        latents = (self.q_rank or 0) + self.kv_rank
        return (
            self._saved("latents", latents, LATENTS),
            self._saved("latents after their norms", latents),
            self._saved("scales of their norms", 2 if self.q_rank else 1, float32=True),
            self._saved("q", self.queries, "attention"),
            self._saved("k", self.keys, "attention"),
            self._saved("v", self.keys, "attention"),
            self._saved("attention", self.queries, "attention"),
            self._saved("attention log-sum-exp", self.heads, "attention", float32=True),
            self._saved("attention, for o_proj", self.heads * self.value_dim),
        )

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `Attention.row_shapes`: keys and values of every head, not the latents."""
        return dict.fromkeys(("keys", "values"), (self.heads, self.head_dim))

    @property
    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `row_shapes`, of a cache of latents: what all heads share, and the rotary channels of k."""
        return {"latents": (1, self.kv_rank + self.rotary_dim)}

    def reach(self, sample_tokens: float) -> float:
        """As `Attention.reach`."""
        return sample_tokens
