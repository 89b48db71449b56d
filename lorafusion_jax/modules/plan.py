"""Which adapters a linear layer has, and their initial tensors.

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lorafusion_jax.adapters.bank import kind_numbers, start_bank
from lorafusion_jax.adapters.init import init_bank
from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind, leaves_of
from lorafusion_jax.modules.linear import Linear


class Calls:
    """Which adapted layers of a model have run in this process, and whose weights something else has read.

    Its plans share one; programs do not depend on it.
    """

    def __init__(self, paths: Iterable[str], ran: Iterable[str] = (), read: Iterable[str] = ()):
        self.paths, self.ran, self.read = tuple(paths), set(ran), set(read)

    def bypassed(self, ran: Collection[str], read: Collection[str]) -> list[str]:
        """Returns the layers that did not run where others did, and those whose weights something else read."""
        return [path for path in self.paths if path in read or (ran and path not in ran)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAPlan:
    """Static data of an adapted layer.

    Args:
        path: path of the layer in its model.
        linear: its product.
        adapters: adapters of the model, in stacking order.
        members: indices of the adapters that target this layer.
        rank: R.
        calls: of the model's layers (None: they are found by running the model).
    """

    path: str
    linear: Linear
    adapters: tuple[AdapterSpec, ...]
    members: tuple[int, ...]
    rank: int
    calls: Calls | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, path: str, linear: Linear, adapters: Sequence[AdapterSpec], members: Sequence[int],
        calls: Calls | None = None,
    ) -> LoRAPlan:  # fmt: skip
        """Pads to the largest rank of the members."""
        rank = max(adapters[index].rank for index in members)
        return cls(path=path, linear=linear, adapters=tuple(adapters), members=tuple(members), rank=rank, calls=calls)

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds of the members, each once."""
        return tuple(dict.fromkeys(self.adapters[index].kind for index in self.members))

    @property
    def numbers(self) -> np.ndarray | None:
        """Numbers of the adapters' kinds, see `kind_numbers`."""
        kinds = [spec.kind if index in self.members else None for index, spec in enumerate(self.adapters)]
        return kind_numbers(self.names, kinds)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return leaves_of(self.names)

    @property
    def leaf_names(self) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self.leaves)

    @property
    def layers(self) -> int:
        """Number of layers in the stack, 1 for a single layer."""
        return math.prod(self.linear.stack)

    @property
    def paths(self) -> list[str]:
        """Paths of the single layers of a stack: that of the stack with their number."""
        stack = self.linear.stack
        return numbered_paths(self.path, stack) if stack else [self.path]

    @property
    def sites(self) -> np.ndarray:
        """Dropout sites, int32 [stack]."""
        return dropout_sites(self.path, self.linear.stack)

    def parameters(self) -> dict[str, int]:
        """Counts the parameters of each adapter in this layer, at its own rank."""
        num_in, num_out = self.linear.in_features, self.linear.out_features
        return {
            spec.name: self.layers
            * adapter_kind(spec.kind).num_parameters(in_features=num_in, out_features=num_out, rank=spec.rank)
            for spec in (self.adapters[index] for index in self.members)
        }

    def start(self, largest: tuple[int, int], weight: Callable[[], Array]) -> dict[str, Array]:
        """Draws the tensors of all adapters, [stack, A, ...]. Each single layer has its own.

        Args:
            largest: K and N of the tensors that layers share.
            weight: returns the frozen weight [stack, ...], for kinds whose initial values depend on it.
        """
        sizes = (self.linear.in_features, self.linear.out_features)
        banks = [init_bank(self.adapters, path, *sizes, self.rank, self.members, largest) for path in self.paths]
        arrays = [{leaf.name: bank[leaf.name] for leaf in self.leaves} for bank in banks]
        if any(adapter_kind(name).start for name in self.names):
            arrays = self._started(arrays, weight())
        stacked = {name: np.stack([array[name] for array in arrays]) for name in self.leaf_names}
        return {
            name: jnp.asarray(array.reshape(*self.linear.stack, *array.shape[1:])) for name, array in stacked.items()
        }

    def _started(self, banks: list[dict[str, np.ndarray]], weight: Array) -> list[dict[str, Array]]:
        """Fills in the initial values that depend on the weight, for each layer of a stack."""
        sizes, inside = (self.linear.in_features, self.linear.out_features), list(self.linear.inside)
        kernels = weight.reshape(-1, *self.linear.shape)
        free = [axis for axis in range(kernels.ndim - 1) if axis not in inside]
        return [
            start_bank(
                self.names,
                self.numbers,
                {name: jnp.asarray(array) for name, array in bank.items()},
                jnp.transpose(kernel, [*inside, *free]).reshape(sizes),
                shape=sizes,
                ranks=[spec.rank for spec in self.adapters],
                scales=[spec.scale for spec in self.adapters],
            )
            for bank, kernel in zip(banks, kernels, strict=True)
        ]


def numbered_paths(path: str, stack: Sequence[int]) -> list[str]:
    """("layers.up", (2,)) → ["layers.up.0", "layers.up.1"]."""
    return [".".join(map(str, (path, *number))).lstrip(".") for number in np.ndindex(*stack)]


def dropout_sites(path: str, stack: Sequence[int]) -> np.ndarray:
    """Dropout sites of a layer or of the layers of a stack, int32 [stack]: a function of their paths."""
    paths = numbered_paths(path, stack) if stack else [path]
    return np.array([zlib.crc32(single.encode()) >> 1 for single in paths], np.int32).reshape(tuple(stack))
