"""Which adapter the rows of a microbatch belong to, and what that means for every layer.

T packed tokens · A adapters
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.spec import AdapterSpec
from pallas_kernels import Dropout, Implementation, fold_key

SITES_PER_LAYER = 8  # room for the dropout sites of one layer: inputs of qkv, o, gate-up, down


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAContext:
    """Everything that a LoRA layer must know of a microbatch besides x.

    y[t] = x[t] W + scale[k] · (drop(x[t]) A[k]) B[k],  k = tile_adapter[t / tile]

    Args:
        tile_adapter: adapter of each tile of rows, -1 for padding. The tile is the number of rows divided by the length
            of this table, so a table with one entry per example serves any [examples, positions, features] input.
        scale: factor of each adapter.
        dropout: rates and keys; None switches dropout off.
        layer: number of the layer, folded into dropout's keys; a tracer inside a scan.
        implementation: handed to `pallas_kernels`.

    >>> specs = [AdapterSpec(name="law", rank=8, alpha=16), AdapterSpec(name="med", rank=4, alpha=4)]
    >>> LoRAContext.of(specs, [0, 1, 1, -1]).scale.tolist()
    [2.0, 1.0]
    """

    tile_adapter: Int[Array, " tiles"]
    scale: Float[Array, " A"]
    dropout: Dropout | None = None
    layer: int | Int[Array, ""] = 0
    implementation: Implementation | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(
        cls,
        adapters: Sequence[AdapterSpec],
        tile_adapter: Sequence[int] | Int[Array, " tiles"],
        *,
        row_key: UInt32[Array, " T"] | None = None,
        implementation: Implementation | None = None,
    ) -> LoRAContext:
        """Builds the context of some adapters.

        Args:
            adapters: in the order of the stacked weights.
            tile_adapter: see the class.
            row_key: one key per row switches dropout on (a training step); equal keys draw equal masks.
            implementation: handed to `pallas_kernels`.

        Raises:
            ConfigError: `lora.unknown-adapter`, the table names an adapter that is not there; arrays of jax are not
                looked into, as they may be traced.
        """
        if not isinstance(tile_adapter, jax.Array):
            _check_table(np.asarray(tile_adapter), len(adapters))
        return cls(
            tile_adapter=jnp.asarray(tile_adapter, jnp.int32),
            scale=jnp.asarray([spec.scale for spec in adapters], jnp.float32),
            dropout=None if row_key is None else _dropout(adapters, row_key),
            implementation=implementation,
        )

    def at_layer(self, layer: int | Int[Array, ""]) -> LoRAContext:
        """The same context for a certain layer: every layer draws its own dropout."""
        return replace(self, layer=layer)

    def at_site(self, site: int) -> Dropout | None:
        """Dropout of one input of this layer; projections that share the input share the site."""
        if self.dropout is None:
            return None
        return replace(self.dropout, key=fold_key(self.dropout.key, self.layer * SITES_PER_LAYER + site))


def _check_table(table: np.ndarray, count: int) -> None:
    wrong = sorted({number for number in table.ravel().tolist() if number not in range(-1, count)})
    if wrong:
        raise ConfigError(
            "lora.unknown-adapter",
            f"tile_adapter names {', '.join(map(str, wrong))} and there are {count} adapters.",
            fix=f"numbers from 0 to {count - 1} in the order of the adapters, -1 for padding",
        )


def _dropout(adapters: Sequence[AdapterSpec], row_key: UInt32[Array, " T"]) -> Dropout:
    rate = jnp.asarray([spec.dropout for spec in adapters], jnp.float32)
    key = jnp.asarray([dropout_key(spec.seed) for spec in adapters], jnp.uint32)
    return Dropout(rate=rate, key=key, row_key=row_key)


def dropout_key(seed: int) -> int:
    """uint32 key of an adapter, a function of its seed alone."""
    return int.from_bytes(hashlib.sha256(b"dropout %d" % seed).digest()[:4], "little")
