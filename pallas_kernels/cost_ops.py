"""Work of the ops that serve several projections: siblings of one input, and the gated MLP. Counts are those of `cost`.

T packed tokens · K in features · N out features · D model width · F MLP width · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.cost import Cost, LayerCost, OpCost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiblingsCost(OpCost):
    """Cost of one op over several projections of one input (q, k, v; gate, up): `multi_lora_linears`.

    x is read once for S of all projections and once for dA of all. Every projection has its own products. Those for dx
    add to the sum so far, which all but the first read; the widest with LoRA takes the low-rank part of all.

    Args:
        out_features, ranks: of each projection; rank 0: without LoRA.

    Example:
        >>> from pallas_kernels.cost import H200
        >>> both = SiblingsCost(tokens=8192, in_features=4096, out_features=(4096, 1024), ranks=(16, 16))
        >>> round(1e6 * both.floor_s(H200)), round(1e6 * sum(layer.floor_s(H200) for layer in both.layers))  # us
        (926, 957)
    """

    tokens: int
    in_features: int
    out_features: tuple[int, ...]
    ranks: tuple[int, ...]
    adapters: int = 1
    dropout: bool = False
    item: int = 2  # bytes of an element

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """Each projection as an op of its own."""
        return tuple(
            LayerCost(
                tokens=self.tokens,
                in_features=self.in_features,
                out_features=columns,
                rank=rank,
                adapters=self.adapters,
                dropout=self.dropout,
                item=self.item,
            )
            for columns, rank in zip(self.out_features, self.ranks, strict=True)
        )

    @property
    def frozen(self) -> tuple[Cost, ...]:
        forward, dx = zip(*(layer.frozen for layer in self.layers), strict=True)
        return (*forward, dx[0], *(cost + self._sum_so_far for cost in dx[1:]))

    @property
    def passes(self) -> dict[str, Cost]:
        passes = self.input_passes
        for i, layer in enumerate(self.layers):
            layer_passes = layer.passes
            passes |= {f"{name} {i}": layer_passes[name] for name in ("forward", "dsdb") if name in layer_passes}
        return passes

    @property
    def input_passes(self) -> dict[str, Cost]:
        """All but those that read or write one projection's output for its LoRA: bits, S of all, dA of all, dx."""
        layers, count = self.layers, len(self.layers)
        dx = dict(zip((f"dx {i}" for i in range(count)), self.frozen[count:], strict=True))
        if not any(self.ranks):
            return dx
        widest = max((i for i in range(count) if self.ranks[i]), key=lambda i: self.out_features[i])
        # One layer with the ranks of all side by side: S, dA and the low-rank part of dx know nothing of N.
        together = dataclasses.replace(layers[widest], rank=sum(self.ranks)).passes
        dx[f"dx {widest}"] = together["dx"] + self._sum_so_far if widest else together["dx"]
        return {name: together[name] for name in ("bits", "down", "da") if name in together} | dx

    @property
    def _sum_so_far(self) -> Cost:
        return Cost(flops=0, bytes=self.item * self.tokens * self.in_features)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpCost(OpCost):
    """Cost of down(silu(gate(x)) · up(x)) as one op: `multi_lora_mlp`.

    The products to gate and up, and to dh in backward, are those of the frozen base. The passes over the gated arrays,
    which the base needs, too, do the low-rank work on their way: forward adds S B to gate and up and makes S and the
    bits of down; backward adds the low-rank part of dh and makes dA of down, dS and dB of gate and up.

    Args:
        ranks: of gate, up and down; 0: without LoRA.

    Example:
        >>> from pallas_kernels.cost import H200
        >>> mlp = MlpCost(tokens=8192, width=4096, inner=14336, ranks=(16, 16, 16))
        >>> round(1e3 * mlp.floor_s(H200), 2), round(1e3 * mlp.frozen_floor_s(H200), 2)  # ms
        (7.8, 7.74)
    """

    tokens: int
    width: int
    inner: int
    ranks: tuple[int, int, int]
    adapters: int = 1
    dropout: bool = False
    item: int = 2  # bytes of an element

    @property
    def siblings(self) -> SiblingsCost:
        """gate and up, as if they were an op of their own."""
        return SiblingsCost(
            tokens=self.tokens,
            in_features=self.width,
            out_features=(self.inner, self.inner),
            ranks=self.ranks[:2],
            adapters=self.adapters,
            dropout=self.dropout,
            item=self.item,
        )

    @property
    def down(self) -> LayerCost:
        """down, as if it were an op of its own."""
        return LayerCost(
            tokens=self.tokens,
            in_features=self.inner,
            out_features=self.width,
            rank=self.ranks[2],
            adapters=self.adapters,
            dropout=self.dropout,
            item=self.item,
        )

    @property
    def frozen(self) -> tuple[Cost, ...]:
        gate, up, *dx = self.siblings.frozen
        forward, dh = self.down.frozen
        return (gate, up, self._gating(3), forward, dh, self._gating(5), *dx)

    @property
    def passes(self) -> dict[str, Cost]:
        t, f, a, i = self.tokens, self.inner, self.adapters, self.item
        before, after = self.ranks[0] + self.ranks[1], self.ranks[2]
        gate, up, gating, _, dh, gating_back, *_ = self.frozen
        down_passes = self.down.passes
        low = i * (t + a * f) * (before + after) + self.down.bits  # S and B before the gate, S (or dS) and A after it
        gradients = i * t * before + 4 * a * f * (before + after)  # dS, dB before the gate; dA after it
        return self.siblings.input_passes | {
            "gate": gate,
            "up": up,
            "gating": gating + Cost(flops=2 * t * f * (before + after), bytes=low),
            **{name: down_passes[name] for name in ("forward", "dsdb") if name in down_passes},
            "dh": dh,
            # S B once more, dS, dB before the gate; dS A^T, dA after it
            "gating back": gating_back + Cost(flops=2 * t * f * (3 * before + 2 * after), bytes=low + gradients),
        }

    def _gating(self, arrays: int) -> Cost:
        """A pass over so many arrays [T, F]; what it computes is no product and costs nothing beside moving them."""
        return Cost(flops=0, bytes=arrays * self.item * self.tokens * self.inner)
