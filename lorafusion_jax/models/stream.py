"""What layers pass on: activations, and the keys and values that later layers read.

Dims: `T` packed tokens · `D` model width · `K` key heads · `C` head width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import export
from jaxtyping import Array, Float

type KeysAndValues = tuple[Float[Array, "T K C"], Float[Array, "T K C"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Stream:
    """Activations, with keys and values by the module of the layers that read them.

    A layer adds keys and values at most once to each module, and never changes them.
    """

    x_TD: Float[Array, "T D"]
    shared: dict[str, Any]  # `KeysAndValues`; in generation `cache.CachedKeys`


# Programs in lowered form are kept between starts, see `pipeline.lowered`, with the trees of their results.
export.register_pytree_node_serialization(
    Stream,
    serialized_name="lorafusion_jax.models.stream.Stream",
    serialize_auxdata=lambda static: b"",
    deserialize_auxdata=lambda text: (),
    from_children=lambda aux_data, children: Stream(*children),
)


def activations(carried: Any) -> Any:
    """Returns the activations of what layers pass on."""
    return carried.x_TD if isinstance(carried, Stream) else carried


def added(after: Any, before: Any) -> Any:
    """Returns `after` without what `before` has, too; see `joined`."""
    if not isinstance(before, Stream) or not isinstance(after, Stream):
        return after
    return Stream(after.x_TD, {name: pair for name, pair in after.shared.items() if name not in before.shared})


def joined(after: Any, before: Any) -> Any:
    """Returns what layers pass on from what they add to what they were given."""
    if not isinstance(before, Stream) or not isinstance(after, Stream):
        return after
    return Stream(after.x_TD, before.shared | after.shared)
