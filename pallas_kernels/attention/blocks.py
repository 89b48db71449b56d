"""Where the document of each row begins and ends: all that attention needs to know about packing.

Documents are contiguous, so a row sees exactly the rows from its document's first up to itself, and is seen by the rows
from itself up to its document's last. Ranges of blocks follow from the first or last row of a block.
T packed rows · M document slots
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def document_rows(ids_T: jax.Array, offsets_M: jax.Array, lengths_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """first[t] = offsets[ids[t]] and end[t] = first[t] + lengths[ids[t]], int32 [T].

    Args:
        ids_T: 0, 0, 1, 1, 1, …: the number of each row's document, rising along the rows.
        offsets_M: first row of each document; slots beyond the last document hold anything.
        lengths_M: rows of each document.

    Example:
        >>> first, end = document_rows(jnp.array([0, 0, 1, 1, 1]), jnp.array([0, 2, -1]), jnp.array([2, 3]))
        >>> first.tolist(), end.tolist()
        ([0, 0, 2, 2, 2], [2, 2, 5, 5, 5])
    """
    first_T = jnp.asarray(offsets_M)[ids_T].astype(jnp.int32)
    return first_T, first_T + jnp.asarray(lengths_M)[ids_T].astype(jnp.int32)
