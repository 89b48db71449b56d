"""Tensors of a checkpoint that hold several projections, or that have the names of another family's modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.table import family_named

_TABLE = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """Some rows of a checkpoint's tensor, or all of it.

    Attributes:
        name: of the tensor.
        first: row of it.
        shape: of the rows.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0


def as_published(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, RowsOf]:
    """Finds in a checkpoint what the names of its family mean, a tensor for each projection.

    Args:
        shapes: of the checkpoint's tensors, by name.
    """
    family = family_named(config.family)
    of_other = family.saved_as and _TABLE in shapes and family.tensor_name(_TABLE) not in shapes
    tensors = {
        (family.tensor_name(name) if of_other else name): RowsOf(name=name, shape=shape)
        for name, shape in shapes.items()
    }
    for joined, rows_of in _joined_rows(config).items():
        if joined not in tensors or tensors[joined].shape[:1] != (sum(rows_of.values()),):
            continue  # whoever compares names and shapes says so
        joint, first = tensors.pop(joined), 0
        for name, rows in rows_of.items():
            tensors[name] = RowsOf(name=joint.name, shape=(rows, *joint.shape[1:]), first=first)
            first += rows
    return tensors


def _joined_rows(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Tensor of a checkpoint → the projections' tensors that it holds, and the rows of each."""
    family, rows_of = family_named(config.family), {}
    for number, layer in enumerate(config.layers) if family.joined else ():
        linears = {linear.path: linear for linear in layer.linears}
        for joined, paths in family.joined.items():
            for leaf in ("weight", "bias"):
                rows_of[family.tensor_name(f"model.layers.{number}.{joined}.{leaf}")] = {
                    family.tensor_name(f"model.layers.{number}.{path}.{leaf}"): linears[path].out_features
                    for path in paths
                    if path in linears
                }
    return rows_of
