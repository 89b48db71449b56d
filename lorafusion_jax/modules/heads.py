"""Finds output heads: layers that "all-linear" leaves out."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from flax import linen, nnx

from lorafusion_jax.modules.tree import Path, dotted

HEADS = ("head", "lm_head", "logits", "classifier")  # last part of a head's path in a model without vocabulary
_LAYER = re.compile(r".*_\d+")


def find_heads(
    layers: Sequence[tuple[Path, int, bool]], tables: Sequence[tuple[int, ...]], named: Sequence[str] | None
) -> Collection[Path]:
    """Returns the paths of the output heads among linear layers.

    The named ones. If none are named, the last layer that is as wide as the vocabulary and outside of repeated layers;
    in a model without a vocabulary, layers with a usual name.

    Args:
        layers: path, out features, and whether it is a stack of layers.
        tables: shapes of the embedding tables. The longest one has the vocabulary.
        named: last parts of paths, or whole paths; empty for no head.
    """
    if named is not None:
        return {path for path, _, _ in layers if any(_is_called(path, name) for name in named)}
    vocabulary = max((shape[0] for shape in tables if len(shape) == 2), default=None)
    if vocabulary is None:
        return {path for path, _, _ in layers if path and path[-1] in HEADS}
    wide = [path for path, width, stacked in layers if width == vocabulary and not stacked and not _is_repeated(path)]
    return set(wide[-1:])


def is_embedding(module: Any) -> bool:
    """Whether a module is a table of embeddings, by Flax's classes or by the name of its class."""
    return isinstance(module, nnx.Embed | linen.Embed) or "embed" in type(module).__name__.lower()


def _is_called(path: Path, name: str) -> bool:
    return dotted(path) == name or dotted(path).endswith(f".{name}")


def _is_repeated(path: Path) -> bool:
    """Whether a path leads through a layer with a number."""
    return any(isinstance(part, int) or part.isdigit() or _LAYER.fullmatch(part) for part in path[:-1])
