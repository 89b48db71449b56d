"""Adapter kinds: the trainable tensors of a projection, and the low-rank pair that they form.

To add one, add a row to `KINDS`. Other packages can install an entry point of the group
`lorafusion_jax.adapter_kinds` that loads an `AdapterKind`. Never imports jax, because planning needs sizes.

Axes: `K` in features · `N` out features · `R` rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lorafusion_jax.plugins import find, not_known

GROUP = "lorafusion_jax.adapter_kinds"
type Axis = Literal["K", "N", "R"]
type Draw = Callable[[int], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One trainable tensor of a projection.

    In training they lie side by side at their own ranks, along R; without R they are stacked in front of their axes.
    `AdapterKind.low_rank` and modules see them stacked, [A, *axes], with R the largest rank of a projection. What lies
    beyond an adapter's own rank is zero there and stays zero.

    Args:
        name: name of the leaf, e.g. "lora_a". A name has the same meaning in all kinds.
        axes: letters of its axes; R at most once.
        init: (draw, shape) → initial values. `draw(n)` returns n float32 numbers, uniform in [0, 1), that depend only
            on the adapter's seed, the projection and the leaf.
        peft_key: name in a PEFT folder, e.g. "lora_A.weight"; tensors of two axes are stored transposed there. None:
            PEFT has no such tensor, and an export folds it into A and B.
    """

    name: str
    axes: tuple[Axis, ...]
    init: Callable[[Draw, tuple[int, ...]], np.ndarray]
    peft_key: str | None = None

    def shape(self, in_features: int, out_features: int, rank: int) -> tuple[int, ...]:
        """Shape of one adapter's tensor."""
        sizes = {"K": in_features, "N": out_features, "R": rank}
        return tuple(sizes[axis] for axis in self.axes)

    def at_rank(self, array: Any, rank: int) -> Any:
        """Cuts an array [..., *axes] down to a rank."""
        if "R" not in self.axes:
            return array
        return array[(..., *(slice(rank) if axis == "R" else slice(None) for axis in self.axes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """A kind of adapter whose branch is a low-rank product: y = x W + scale · (drop(x) A) B.

    Args:
        leaves: its trainable tensors.
        low_rank: leaves by name, each [n, *axes] → (A [n, K, R], B [n, R, N]). It is traced by jax for training and
            called with numpy arrays for exports, so use only operators and indexing. Zero columns of A and rows of B
            beyond an adapter's rank must stay zero.

    Example:
        >>> LORA.num_parameters(in_features=8, out_features=4, rank=2)
        24
    """

    leaves: tuple[Leaf, ...]
    low_rank: Callable[[Mapping[str, Any]], tuple[Any, Any]]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(leaf.name for leaf in self.leaves)

    @property
    def in_peft(self) -> bool:
        """Whether a PEFT folder holds all its tensors, so that training can continue from one."""
        return all(leaf.peft_key for leaf in self.leaves)

    def leaf(self, name: str) -> Leaf:
        return next(leaf for leaf in self.leaves if leaf.name == name)

    def num_parameters(self, *, in_features: int, out_features: int, rank: int) -> int:
        """Number of trainable parameters of one adapter in one projection."""
        return sum(math.prod(leaf.shape(in_features, out_features, rank)) for leaf in self.leaves)


def _kaiming(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """U(-1/sqrt(K), 1/sqrt(K)), as PEFT draws A (Kaiming uniform with a = sqrt 5)."""
    bound = np.float32(1 / math.sqrt(shape[0]))
    return ((2 * draw(math.prod(shape)) - 1) * bound).reshape(shape)


def _zeros(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    del draw  # unused
    return np.zeros(shape, np.float32)


LORA_A = Leaf(name="lora_a", axes=("K", "R"), init=_kaiming, peft_key="lora_A.weight")
LORA_B = Leaf(name="lora_b", axes=("R", "N"), init=_zeros, peft_key="lora_B.weight")
LORA = AdapterKind(leaves=(LORA_A, LORA_B), low_rank=lambda leaves: (leaves["lora_a"], leaves["lora_b"]))

KINDS: Mapping[str, AdapterKind] = {"lora": LORA}


def adapter_kind(name: str) -> AdapterKind:
    """Finds a kind by its name in a job file.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, KINDS, name, AdapterKind)


def unknown_kind(name: str) -> str | None:
    """Explains an unknown `lora.kind`; None if the name exists."""
    return not_known(GROUP, KINDS, name)


def leaves_of(kinds: tuple[str, ...]) -> tuple[Leaf, ...]:
    """The tensors of all these kinds in order, each name once."""
    found = {leaf.name: leaf for name in kinds for leaf in adapter_kind(name).leaves}
    return tuple(found.values())
