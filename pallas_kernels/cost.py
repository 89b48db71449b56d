"""Work of a LoRA linear layer: floating-point operations, bytes through device memory, and the time they cost at least.

Counts are of the split graph with every tensor moved once by every pass: what an ideal implementation would do, the
yardstick of the benchmark and of `lorafusion plan`.  Nothing here touches a device or imports jax.
Ops of several projections are in `cost_ops`.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.experimental.pallas import CostEstimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device reaches at best: measured rates, not those of a data sheet."""

    flops: float  # matrix products, per second
    bytes: float  # device memory, read plus written, per second


H200 = Ceilings(flops=790e12, bytes=4.3e12)  # measured: bfloat16 products 690 to 790 TFLOP/s, copy 4.3 TB/s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Operations and bytes of one pass; add passes up with `+`.

    Example:
        >>> cost = product(rows=2, inner=3, columns=4)
        >>> cost.flops, cost.bytes
        (48, 52)
    """

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def floor_s(self, ceilings: Ceilings) -> float:
        """The larger of computing and moving: no kernel of this pass is faster."""
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bytes)

    def estimate(self) -> CostEstimate:
        """For XLA's scheduler, which cannot look into a kernel."""
        from jax.experimental.pallas import CostEstimate  # here: counting needs no jax, importing it takes a second

        return CostEstimate(flops=self.flops, bytes_accessed=self.bytes, transcendentals=0)


def product(*, rows: int, inner: int, columns: int, item: int = 2) -> Cost:
    """[rows, inner] times [inner, columns], elements of `item` bytes.

    Example:
        >>> product(rows=1, inner=2, columns=3, item=4)
        Cost(flops=12, bytes=44)
    """
    return Cost(flops=2 * rows * inner * columns, bytes=item * (rows * inner + inner * columns + rows * columns))


def add_up(costs: Iterable[Cost]) -> Cost:
    """The work of passes that follow one another.

    Example:
        >>> add_up([Cost(flops=1, bytes=2), Cost(flops=3, bytes=4)])
        Cost(flops=4, bytes=6)
    """
    return sum(costs, Cost(flops=0, bytes=0))


class OpCost:
    """What the costs of all ops share: an op is passes by name, and passes that it would need without LoRA."""

    __slots__ = ()

    @property
    def frozen(self) -> tuple[Cost, ...]:
        """Forward and dx without LoRA: the unavoidable cost."""
        raise NotImplementedError

    @property
    def passes(self) -> dict[str, Cost]:
        """Forward and backward (dx, dA, dB) with LoRA."""
        raise NotImplementedError

    @property
    def total(self) -> Cost:
        return add_up(self.passes.values())

    def floor_s(self, ceilings: Ceilings) -> float:
        """Sum of the floors of the passes: they follow one another."""
        return sum(cost.floor_s(ceilings) for cost in self.passes.values())

    def frozen_floor_s(self, ceilings: Ceilings) -> float:
        return sum(cost.floor_s(ceilings) for cost in self.frozen)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(OpCost):
    """Cost of one linear layer with LoRA, forward and backward (dx, dA, dB), pass by pass; of rank 0: without LoRA.

    Example:
        >>> layer = LayerCost(tokens=8192, in_features=4096, out_features=4096, rank=16)
        >>> round(1e6 * layer.floor_s(H200)), round(1e6 * layer.frozen_floor_s(H200))  # us
        (746, 696)
    """

    tokens: int
    in_features: int
    out_features: int
    rank: int
    adapters: int = 1
    dropout: bool = False
    item: int = 2  # bytes of an element

    @property
    def bits(self) -> int:
        """Bytes of the packed keep bits."""
        return self.tokens * math.ceil(self.in_features / 256) * 32 if self.dropout and self.rank else 0

    @property
    def frozen(self) -> tuple[Cost, Cost]:
        t, k, n = self.tokens, self.in_features, self.out_features
        return (
            product(rows=t, inner=k, columns=n, item=self.item),
            product(rows=t, inner=n, columns=k, item=self.item),
        )

    @property
    def passes(self) -> dict[str, Cost]:
        """The five kernels of the split graph (and the bits), each tensor once."""
        t, k, n, r, a = self.tokens, self.in_features, self.out_features, self.rank, self.adapters
        forward, dx = self.frozen
        if not r:
            return {"forward": forward, "dx": dx}
        low = self.item * t * r
        bank_a, bank_b = self.item * a * k * r, self.item * a * r * n
        passes = {"bits": Cost(flops=0, bytes=self.bits)} if self.dropout else {}
        return passes | {
            "down": Cost(flops=2 * t * k * r, bytes=self.item * t * k + bank_a + low + self.bits),
            "forward": forward + Cost(flops=2 * t * r * n, bytes=low + bank_b),
            "dsdb": Cost(flops=4 * t * n * r, bytes=self.item * t * n + bank_b + 2 * low + 4 * a * r * n),
            "da": Cost(flops=2 * t * k * r, bytes=self.item * t * k + low + 4 * a * k * r + self.bits),
            "dx": dx + Cost(flops=2 * t * k * r, bytes=low + bank_a + self.bits),
        }

    @property
    def naive_bytes(self) -> int:
        """Bytes of the layer as it is written in plain JAX: S B, its sum with x W, and dS A^T go through memory.

        With dropout a dropped copy of x and a mask of one byte per element, both kept for the backward pass.
        """
        t, k, n, i = self.tokens, self.in_features, self.out_features, self.item
        x, y = i * t * k, i * t * n
        total = sum(cost.bytes for cost in self.frozen)
        total += x + y + 3 * y  # S reads x; S B written; read twice and written once by the sum
        total += 2 * y + x + x + 3 * x  # dS, dB read dY; dA reads x; dS A^T written; added to dx
        if self.dropout:
            mask = t * k
            total += 2 * x + mask + 2 * x + mask  # x read, dropped copy and mask written; dS A^T masked in a pass
        return total
