"""How a frozen weight lies on a mesh: an array [K, N], or a quantised weight whose arrays follow K and N.

A quantised weight says which dimension each axis of its arrays follows (`frozen_weight.SplittableWeight`). Partition
specs and names for sharding rules come from these words, so what moves between devices are the stored bytes.

K in features · N out features
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pallas_kernels.frozen_weight import dimensions_of, is_quantised

ARRAY = "k n"  # dimensions of a weight that is an array
type Axes = tuple[str, ...]


def weight_spec(w: Any, spec_of: Callable[[Any], PartitionSpec]) -> PartitionSpec:
    """Partition spec [K, N] of a weight; `spec_of` gives that of an array."""
    if not is_quantised(w):
        return spec_of(w)
    entries: dict[str, Any] = {}
    largest, words = max(_arrays(w), key=lambda pair: math.prod(pair[0].shape))
    spec = spec_of(largest)
    for word, entry in zip(words, (*spec, *(None,) * (len(words) - len(spec))), strict=True):
        entries[word[0]] = entry
    return PartitionSpec(entries["k"], entries["n"])


def array_specs(w: Any, k: Axes, n: Axes) -> Any:
    """Partition specs of a weight's arrays whose K and N lie on these axes."""
    return jax.tree.map(lambda text: spec_of(text, k, n), dimensions_of(w) if is_quantised(w) else ARRAY)


def spec_of(dimensions: str, k: Axes, n: Axes) -> PartitionSpec:
    """Partition spec of an array whose axes follow these dimensions."""
    axes = {"k": k, "n": n, "*": ()}
    return PartitionSpec(*(axes[word[0]] or None for word in dimensions.split()))


def rule_names(w: Any, i: int) -> Any:
    """Names of the dimensions of a weight's arrays in a sharding rule, for projection i.

    Shorter axes ("k/64") get names of their own: XLA cannot know that they go with K, and the partitioner sees to it.
    """
    unused = iter(range(1000))
    names = {"k": "k", "n": f"n{i}"}

    def named(text: str) -> str:
        return " ".join(names.get(word, f"w{i}x{next(unused)}") for word in text.split())

    return jax.tree.map(named, dimensions_of(w) if is_quantised(w) else ARRAY)


def shard_step(ws: Sequence[Any], letter: str) -> int:
    """Every shard of K ("k") or N ("n") holds a multiple of this many features: arrays have one element for so many."""
    words = [word for w in ws if is_quantised(w) for _, words in _arrays(w) for word in words]
    return math.lcm(*(per_element(word) for word in words if word[0] == letter))


def per_element(word: str) -> int:
    """Features for which an axis of these dimensions has one element: 64 for "k/64"."""
    return int(word.partition("/")[2] or 1)


def _arrays(w: Any) -> list[tuple[Any, list[str]]]:
    """The arrays of a quantised weight with the words of their axes."""
    texts = jax.tree.leaves(dimensions_of(w))
    return [(array, text.split()) for array, text in zip(jax.tree.leaves(w), texts, strict=True)]
