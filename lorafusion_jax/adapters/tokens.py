"""Trainable tokens: rows of the embedding, and of the head, that an adapter trains beside its projections.

A row replaces that of the base in the adapter's samples; other adapters see the base's. Where the head is the embedding
(tied), its rows are replaced, too, and both uses share a gradient. Never imports jax, because planning needs sizes.

Source: PEFT's `trainable_token_indices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.lora import zeros

type Table = Literal["embed", "head"]
TABLES: tuple[Table, ...] = ("embed", "head")
MODULES: dict[str, Table] = {"embed_tokens": "embed", "lm_head": "head"}  # PEFT's name of a table → ours
GROUP = "tokens"  # of learning rates
# The values are rows of the base, which are read when the adapter starts; they are stored as columns.
LEAVES: dict[Table, Leaf] = {
    "embed": Leaf(
        name="embed",
        axes=("D", "M"),
        init=zeros,
        lr_group=GROUP,
        peft_name="model.embed_tokens.token_adapter.trainable_tokens_delta",
    ),
    "head": Leaf(
        name="head",
        axes=("D", "M"),
        init=zeros,
        lr_group=GROUP,
        peft_name="lm_head.token_adapter.trainable_tokens_delta",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """The trainable tokens of an adapter, ids in the order of their rows.

    Attributes:
        embed: of the embedding, and of a tied head.
        head: of a head with a table of its own.

    Example:
        >>> rows = TokenRows(embed=(7, 3))
        >>> rows.of("head", tied=True), rows.of("head", tied=False)
        ((7, 3), ())
    """

    embed: tuple[int, ...] = ()
    head: tuple[int, ...] = ()

    def of(self, table: Table, *, tied: bool) -> tuple[int, ...]:
        """The tokens of a table."""
        return self.embed if table == "embed" or tied else self.head

    @property
    def stored(self) -> dict[Table, tuple[int, ...]]:
        """The tokens of each table that has rows in a PEFT folder."""
        rows: dict[Table, tuple[int, ...]] = {"embed": self.embed, "head": self.head}
        return {table: ids for table, ids in rows.items() if ids}

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The tensors of a PEFT folder."""
        return tuple(LEAVES[table] for table in self.stored)

    @property
    def peft(self) -> list[int] | dict[str, list[int]]:
        """What adapter_config.json calls them."""
        if not self.head:
            return list(self.embed)
        return {name: list(self.stored[table]) for name, table in MODULES.items() if table in self.stored}
