"""Rows of a token table that adapters replace by trained ones, each in its own samples.

Values are selected, never multiplied: NaN in the rows of one adapter does not reach another.
T packed tokens · D model width · V vocabulary · C trained rows of all adapters · c rows of a chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

NO_TOKEN = -1


class RowsOf(NamedTuple):
    """Columns of one adapter among the trained rows of all.

    Attributes:
        adapter: its place.
        first: its first column.
        tokens: token of each of its columns.
    """

    adapter: int
    first: int
    tokens: tuple[int, ...]

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + len(self.tokens))


class ReplacedRows(NamedTuple):
    """Trained rows of a table.

    Attributes:
        values_DC: the rows of all adapters.
        owners: which adapters have which.
        row_adapter_T: adapter of each packed token.
    """

    values_DC: Float[Array, "D C"]
    owners: tuple[RowsOf, ...]
    row_adapter_T: Int[Array, " T"]


def tokens_and_adapters(owners: Sequence[RowsOf]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token and the adapter of each column, int32 [C]."""
    ordered = sorted(owners, key=lambda rows: rows.first)
    tokens = [token for rows in ordered for token in rows.tokens]
    adapters = [rows.adapter for rows in ordered for _ in rows.tokens]
    return np.array(tokens, np.int32), np.array(adapters, np.int32)


def replaced_tokens(owners: Sequence[RowsOf], row_adapter_c: Int[Array, " c"], missing: int) -> Int[Array, "c C"]:
    """Returns the token that each column replaces in each row; `missing` in rows of other adapters."""
    tokens_C, adapters_C = tokens_and_adapters(owners)
    return jnp.where(row_adapter_c[:, None] == adapters_C, tokens_C, missing)


def replace_rows(x_TD: Float[Array, "T D"], tokens_T: Int[Array, " T"], rows: ReplacedRows) -> Float[Array, "T D"]:
    """Replaces the embeddings of trained tokens.

    >>> rows = ReplacedRows(jnp.array([[5.0]]), (RowsOf(adapter=0, first=0, tokens=(3,)),), jnp.array([0, 0, 1]))
    >>> replace_rows(jnp.zeros((3, 1)), jnp.array([3, 2, 3]), rows)[:, 0].tolist()
    [5.0, 0.0, 0.0]
    """
    is_token = replaced_tokens(rows.owners, rows.row_adapter_T, NO_TOKEN) == tokens_T[:, None]
    values_TD = rows.values_DC.T.astype(x_TD.dtype)[jnp.argmax(is_token, 1)]
    return jnp.where(is_token.any(1)[:, None], values_TD, x_TD)


def row_gradients(
    dx_TD: Float[Array, "T D"], tokens_T: Int[Array, " T"], owners: Sequence[RowsOf], row_adapter_T: Int[Array, " T"]
) -> Float[Array, "D C"]:
    """Returns the gradient of the trained rows of `replace_rows`, float32, summed in a fixed order."""
    parts = []
    for rows in sorted(owners, key=lambda rows: rows.first):
        is_token = (tokens_T[:, None] == np.array(rows.tokens, np.int32)) & (row_adapter_T == rows.adapter)[:, None]
        dx = jnp.where((row_adapter_T == rows.adapter)[:, None], dx_TD, 0)
        parts.append(product(dx.T, is_token.astype(dx.dtype)))
    return jnp.concatenate(parts, 1)


def value_gradients(
    hidden_TD: Float[Array, "T D"],
    slope_TC: Float[Array, "T C"],
    owners: Sequence[RowsOf],
    row_adapter_T: Int[Array, " T"],
    counts_T: Array,
) -> Float[Array, "D C"]:
    """Returns the gradient of the trained rows of a head from that of their logits.

    Args:
        counts_T: rows that have a loss; others may hold NaN.
    """
    parts = []
    for rows in sorted(owners, key=lambda rows: rows.first):
        mine = ((row_adapter_T == rows.adapter) & counts_T)[:, None]
        hidden, slope = jnp.where(mine, hidden_TD, 0), jnp.where(mine, slope_TC[:, rows.columns], 0)
        parts.append(product(hidden.T, slope.astype(hidden.dtype)))
    return jnp.concatenate(parts, 1)


def hidden_gradient(
    slope_cC: Float[Array, "c C"], values_DC: Float[Array, "D C"], owners: Sequence[RowsOf], row_adapter_c: Array
) -> Float[Array, "c D"]:
    """Returns what the logits of trained rows add to the gradient of the states, float32."""
    total = jnp.zeros((len(slope_cC), len(values_DC)), jnp.float32)
    for rows in owners:
        values = values_DC[:, rows.columns].T
        part = product(slope_cC[:, rows.columns].astype(values.dtype), values)
        total += jnp.where((row_adapter_c == rows.adapter)[:, None], part, 0.0)
    return total


def product(a: Array, b: Array) -> Array:
    """a b in float32, of float32 numbers without tf32, the default of GPUs, which would lose three digits."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
