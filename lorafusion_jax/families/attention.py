"""Attention of a layer: projections, norms of q and k, window, soft cap, scale. `models.self_attention` executes it.

D model width · H heads · K key heads · C head width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lorafusion_jax.families.mechanism import Mixer
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.layout.layer import FrozenArray, Linear, Norm, SavedTensor

QKNorm = Literal["none", "head", "full", "unit"]
Sharing = Literal["none", "gives", "reads"]
MODULE = "self_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Mixer):
    """o_proj(attention(rope(norm(q_proj x)), rope(norm(k_proj x)), v_proj x)).

    o[t] = Σ_s softmax_s(cap(scale · q[t]·k[s])) v[s],  t - window < s ≤ t,  ⌊s / chunk⌋ = ⌊t / chunk⌋,
    cap(z) = soft_cap · tanh(z / soft_cap)

    Args:
        width: D.
        rope: None: q and k do not rotate.
        window: rows that a query sees, itself included (None: all earlier ones of its sample).
        chunk: positions of a sample that see each other come in chunks of this length (None: there are none).
        scale: of the scores (None: 1 / √C).
        soft_cap: bound of the scores (None: none).
        qk_norm: whether q and k are normalised: each head on its own, all heads together, or, "unit", each head on its
            own after they rotate, without a weight.
        bias, o_bias: whether q, k and v, and the output, have a bias.
        turned_norm: q and k of each head are normalised after they rotate, not before.
        fused: q, k and v are one projection, `fused_name`.
        by_head: this projection has q, k and v of one head after those of another; otherwise all of q come first.
        sinks: every head has a frozen score of nothing: softmax's sum has one more term, e^sink.
        gated: q_proj has a gate for each output of attention, which is multiplied by its sigmoid: in each head first
            its queries, then its gates.
        v_norm: whether each head of v is normalised, without a weight.
        k_is_v: v is k before its norm, and there is no `v_proj`.
        sharing: "gives": later layers read its keys and values. "reads": its keys and values are those of the last
            layer before it that has this module and gives them, and it has no projections and norms of its own for
            them.
        in_factor, out_factor: of its input, and of its output.
        out: name of the output's projection.
        module: name of this part of the layer; layers with projections of other shapes have another.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    qk_norm: QKNorm = "none"
    bias: bool = False
    o_bias: bool = False
    fused: bool = False
    fused_name: str = "qkv_proj"
    by_head: bool = False
    turned_norm: bool = False
    sinks: bool = False
    gated: bool = False
    v_norm: bool = False
    k_is_v: bool = False
    sharing: Sharing = "none"
    in_factor: float = 1.0
    out_factor: float = 1.0
    out: str = "o_proj"
    module: str = MODULE

    @property
    def queries(self) -> int:
        """H · C"""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """K · C"""
        return self.kv_heads * self.head_dim

    @property
    def reads(self) -> bool:
        """Whether keys and values are those of another layer."""
        return self.sharing == "reads"

    @property
    def norm_widths(self) -> tuple[int, int] | None:
        """Widths of the norms of q and of k."""
        widths = {"head": (self.head_dim, self.head_dim), "full": (self.queries, self.keys)}
        return widths.get(self.qk_norm)

    @property
    def linears(self) -> tuple[Linear, ...]:
        outputs = {"q_proj": self.queries * (2 if self.gated else 1), "k_proj": self.keys}
        if not self.k_is_v:
            outputs["v_proj"] = self.keys
        if self.reads:
            outputs = {"q_proj": outputs["q_proj"]}
        if self.fused:
            outputs = {self.fused_name: sum(outputs.values())}
        return (
            *(self._linear(name, "qkv", self.width, size, bias=self.bias) for name, size in outputs.items()),
            self._linear(self.out, "o", self.queries, self.width, bias=self.o_bias),
        )

    @property
    def norms(self) -> tuple[Norm, ...]:
        if self.norm_widths is None:
            return ()
        names = [*zip(("q_norm", "k_norm"), self.norm_widths, strict=True)][: 1 if self.reads else 2]
        return self._norms(dict(names))

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        return self._arrays({"sinks": (self.heads,)} if self.sinks else {}, by_head=True)

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        tensors = [
            self._saved("q", self.queries, "attention"),  # after rotary positions
            self._saved("k", self.keys, "attention"),
            self._saved("v", self.keys, "attention"),
            self._saved("attention", self.queries, "attention"),
            self._saved("attention log-sum-exp", self.heads, "attention", float32=True),
            # Implementations with NaN isolation restore the isolated rows in another array.
            self._saved("attention, for o_proj", self.queries, unfused=True),
        ]
        if self.gated:
            tensors.append(self._saved("gate of attention", self.queries, "attention_gate"))
            tensors.append(self._saved("gated attention, for o_proj", self.queries))
        if self.reads:
            tensors.append(self._saved("q before its norm", self.queries, "qk_in"))
            tensors.append(self._saved("scales of its norm", self.heads, float32=True))
            return tuple(tensors)
        if self.qk_norm != "none":
            scales = 2 if self.qk_norm == "full" else self.heads + self.kv_heads
            tensors.append(self._saved("q, k before their norms", self.queries + self.keys, "qk_in"))
            tensors.append(self._saved("scales of their norms", scales, float32=True))
        if self.v_norm:
            tensors += [] if self.k_is_v else [self._saved("v before its norm", self.keys, "qk_in")]
            tensors.append(self._saved("scales of the norm of v", self.kv_heads, float32=True))
        return tuple(tensors)

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what each token keeps for the next ones of its sequence. A layer that reads others' keeps nothing.

        >>> Attention(width=8, heads=2, kv_heads=1, head_dim=4).row_shapes
        {'keys': (1, 4), 'values': (1, 4)}
        """
        return {} if self.reads else dict.fromkeys(("keys", "values"), (self.kv_heads, self.head_dim))

    def reach(self, sample_tokens: float) -> float:
        """Length of the sample that would have as many pairs of rows per row without a window.

        >>> Attention(width=8, heads=1, kv_heads=1, head_dim=8, window=256).reach(1024)
        448.0
        """
        if self.chunk is not None:
            return min(self.chunk, sample_tokens)
        if self.window is None or self.window >= sample_tokens:
            return sample_tokens
        return 2 * self.window - self.window**2 / sample_tokens
