"""Mamba-2 in place of attention: a state per head instead of all earlier keys and values. `models.mamba` executes it.

D model width · H heads · P head width · G groups of heads · N state width
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lorafusion_jax.families.mechanism import RecurrentMixer
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.layout.layer import MAMBA, FrozenArray, Linear, Norm, SavedTensor

IN, OUT = "mamba_in", "mamba_out"  # sites, and checkpoint names
CHUNK = 64  # rows that are taken together, see `pallas_kernels.state_space`


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(RecurrentMixer):
    """out_proj(norm((space(x·Δ, B, C, Δ·A) + D·x) · silu(z))),  (z, x, B, C, Δ) from in_proj.

    (x, B, C) = act(convolution(x, B, C)),  Δ = softplus(Δ + bias), within limits,  A = -e^A_log

    `pallas_kernels.state_space` has the space. The norm is over the channels of each group of heads.

    Args:
        width: D.
        heads, head_dim, groups, state: H, P, G and N.
        kernel: rows of the convolution.
        bias, out_bias, conv_bias: whether in_proj, out_proj and the convolution have a bias.
        least, most: limits of Δ.
        in_factor, factors, out_factor: of its input, of z, x, B, C and Δ as in_proj gives them (none: 1), and of its
            output.
        adapted_out: whether out_proj may have adapters.
        norm: whether z gates before the norm, after it, or there is no norm.
    """

    width: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int = 4
    activation: Activation = "silu"
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    least: float = 0.0
    most: float = math.inf
    in_factor: float = 1.0
    factors: tuple[float, ...] = ()
    out_factor: float = 1.0
    adapted_out: bool = True
    norm: Literal["gated", "before gate", "none"] = "gated"
    module: str = MAMBA

    @property
    def queries(self) -> int:
        """H · P, width of the output before its projection."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """G · N"""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.queries + 2 * self.keys

    @property
    def linears(self) -> tuple[Linear, ...]:
        inputs = self.queries + self.channels + self.heads
        return (
            self._linear("in_proj", IN, self.width, inputs, bias=self.bias),
            self._linear("out_proj", OUT, self.queries, self.width, bias=self.out_bias, is_target=self.adapted_out),
        )

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self._norms({} if self.norm == "none" else {"norm": self.queries})

    @property
    def arrays(self) -> tuple[FrozenArray, ...]:
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("A_log", "D", "dt_bias"), (self.heads,)),
            "conv1d.weight": (self.channels, 1, self.kernel),
        }
        shapes |= {"conv1d.bias": (self.channels,)} if self.conv_bias else {}
        return self._arrays(shapes)

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        return (
            self._saved("z, x, B, C, Δ", self.queries + self.channels + self.heads, IN),
            self._saved("x, B, C of the space", self.channels),
            self._saved("Δ and its decay", 2 * self.heads, float32=True),
            self._saved("output of the space", self.queries, OUT),
            self._saved("gated output, for out_proj", self.queries),
        )

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `DeltaNet.state_shapes`."""
        return {
            "memory": (self.heads, self.state, self.head_dim),
            "last_rows": (self.kernel - 1, self.channels),
        }

    def reach(self, sample_tokens: float) -> float:
        """As `DeltaNet.reach`."""
        del sample_tokens  # each row reads one state
        return 2 * self.state + CHUNK * (self.state / self.head_dim / self.heads * self.groups + 1)
