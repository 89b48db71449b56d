"""The table of families. To add one, add a row to `dense_rows`, `gemma_rows`, `experts_rows` or `hybrid_rows`.

Other packages can install an entry point of the group `lorafusion_jax.families` that loads a `Family`; its name is the
`model_type` of config.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from lorafusion_jax.families.dense_rows import DENSE
from lorafusion_jax.families.experts_rows import EXPERTS
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.gemma_rows import GEMMA
from lorafusion_jax.families.hybrid_rows import HYBRID
from lorafusion_jax.plugins import find, known_names

GROUP = "lorafusion_jax.families"
FAMILIES: dict[str, Family] = {**DENSE, **GEMMA, **EXPERTS, **HYBRID}


def family_named(name: str) -> Family:
    """Finds the family of a `model_type`.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, FAMILIES, name, Family)


def find_families(architectures: Sequence[str], model_type: str | None) -> set[str | None]:
    """Finds the families of a config.json: none if it is unknown, several if its keys contradict each other.

    transformers loads by `model_type`. One that no family has (None in the result) contradicts known architectures.

    Raises:
        ConfigError: `plugin.broken`, an installed family does not load.
    """
    by_name = {
        name: {family for family, row in FAMILIES.items() if name in row.architectures} for name in architectures
    }
    matches = {name: families for name, families in by_name.items() if families}
    if any(model_type in FAMILIES[family].shared_types for families in matches.values() for family in families):
        model_type = None
    typed = next((name for name, row in FAMILIES.items() if model_type in row.model_types), model_type)
    if typed is None or typed not in known_names(GROUP, FAMILIES):
        others: set[str | None] = {None} if typed is not None and matches else set()
        return others.union(*matches.values())
    row = family_named(typed)
    of_type = (*row.architectures, *row.saved_as)
    if architectures and not matches and not {*architectures} & {*of_type}:
        return set()
    families: set[str | None] = {typed}
    return families.union(*(others for name, others in matches.items() if name not in of_type))


def known_models() -> str:
    """Names of the supported models, for messages."""
    installed = [name for name in known_names(GROUP, FAMILIES) if name not in FAMILIES]
    return ", ".join([*(name for row in FAMILIES.values() for name in row.architectures), *installed])
