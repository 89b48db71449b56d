"""A gated delta net in place of attention: a memory per head instead of all earlier keys and values.
`models.delta_net` executes it.

D model width · K key heads · H value heads · C key width · V value width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lorafusion_jax.families.mechanism import RecurrentMixer
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.layout.layer import LINEAR_ATTENTION, FrozenArray, Linear, Norm, SavedTensor

IN, OUT = "delta_in", "delta_out"  # sites, and checkpoint names
CHUNK = 64  # rows that the rule takes together, see `pallas_kernels.delta_rule`


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(RecurrentMixer):
    """out_proj(norm(rule(q, k, v, decay, β)) · silu(z)).

    (q, k, v) = act(convolution(in_proj x)),  q and k of unit length,  β = sigmoid(b),  decay = -e^A softplus(a + bias)

    `pallas_kernels.delta_rule` has the rule. The convolution is causal, over the last rows of the same sample and each
    channel on its own.

    Args:
        width: D.
        key_heads, value_heads: K and H; H / K value heads share a key head.
        key_dim, value_dim: C and V.
        kernel: rows of the convolution.
        grouped: q, k, v and z are one projection, in_proj_qkvz, and b and a another, in_proj_ba, both key head by key
            head. Otherwise there is one for q, k and v, and one each for z, b and a.
        separate: q, k and v have a projection each, and the gate is `g_proj`; names are those of attention.
        doubled: β = 2 · sigmoid(b).
    """

    width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    activation: Activation = "silu"
    grouped: bool = False
    separate: bool = False
    doubled: bool = False
    module: ClassVar[str] = LINEAR_ATTENTION

    @property
    def queries(self) -> int:
        """H · V, width of the output before its projection."""
        return self.value_heads * self.value_dim

    @property
    def keys(self) -> int:
        """K · C"""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.keys + self.queries

    @property
    def linears(self) -> tuple[Linear, ...]:
        outputs = (
            {"in_proj_qkvz": self.channels + self.queries, "in_proj_ba": 2 * self.value_heads}
            if self.grouped
            else {
                "in_proj_qkv": self.channels,
                "in_proj_z": self.queries,
                "in_proj_b": self.value_heads,
                "in_proj_a": self.value_heads,
            }
        )
        if self.separate:
            widths = (self.keys, self.keys, *[self.queries] * 2, *[self.value_heads] * 2)
            outputs = dict(zip(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), widths, strict=True))
        return (
            *(self._linear(name, IN, self.width, size) for name, size in outputs.items()),
            self._linear(self.out, OUT, self.queries, self.width),
        )

    @property
    def out(self) -> str:
        """Name of the output's projection."""
        return "o_proj" if self.separate else "out_proj"

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self._norms({"norm": self.value_dim})

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        convolutions = {"conv1d.weight": self.channels}
        if self.separate:
            parts = {"q": self.keys, "k": self.keys, "v": self.queries}
            convolutions = {f"conv1d.{part}.weight": size for part, size in parts.items()}
        shapes: dict[str, tuple[int, ...]] = {"A_log": (self.value_heads,), "dt_bias": (self.value_heads,)}
        shapes |= {name: (size, 1, self.kernel) for name, size in convolutions.items()}
        return self._arrays(shapes)

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return (
            self._saved("q, k, v, z, b, a", self.channels + self.queries + 2 * self.value_heads, IN),
            self._saved("q, k, v of the rule", self.channels),
            self._saved("decay and β", 2 * self.value_heads, float32=True),
            self._saved("output of the rule", self.queries, OUT),
            self._saved("gated output, for out_proj", self.queries),
        )

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a sequence keeps for its next tokens: the memory, and the last rows of the convolution."""
        return {
            "memory": (self.value_heads, self.key_dim, self.value_dim),
            "last_rows": (self.kernel - 1, self.channels),
        }

    def reach(self, sample_tokens: float) -> float:
        """Length of the sample on which attention of as many queries would take as many operations per row.

        >>> DeltaNet(width=8, key_heads=1, value_heads=2, key_dim=128, value_dim=128).reach(4096)
        704.0
        """
        del sample_tokens  # each row reads one memory
        return 3 * self.key_dim + CHUNK * (3 * self.key_dim / self.value_dim + 2)
