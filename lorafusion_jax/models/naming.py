"""Names of the decoder's frozen leaves in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a checkpoint and where it lives in the decoder.

    Attributes:
        name: in the checkpoint.
        shape: in the checkpoint.
        path: of the leaf in the decoder's state.
        layer: index into the leaf's leading axis, for scanned layers.
        transposed: linear kernels are [N, K] in the checkpoint and [K, N] here.
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    layer: int | None
    transposed: bool

    @property
    def leaf_name(self) -> str:
        """Name in an unrolled decoder: "layers.0.mlp.up_proj.kernel"."""
        path = self.path if self.layer is None else (self.path[0], self.layer, *self.path[1:])
        return ".".join(map(str, path))


def frozen_tensors(model: nnx.Module) -> list[Tensor]:
    """Lists the checkpoint's tensors of a decoder, real or abstract, in the order of its leaves."""
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    return [tensor for path, leaf in leaves for tensor in _tensors(path, leaf)]


def _tensors(path: Path, leaf: Any) -> Sequence[Tensor]:
    transposed = path[-1] == "kernel"
    if path[0] != "layers" or isinstance(path[1], int):
        return [_tensor(path, path, None, leaf.shape, transposed)]
    count, shape = leaf.shape[0], leaf.shape[1:]
    return [_tensor(("layers", layer, *path[1:]), path, layer, shape, transposed) for layer in range(count)]


def _tensor(names: Path, path: Path, layer: int | None, shape: tuple[int, ...], transposed: bool) -> Tensor:
    *modules, leaf = map(str, names)
    stem = ".".join(modules if modules[0] == "lm_head" else ["model", *modules])
    suffix = "bias" if leaf == "bias" else "weight"
    return Tensor(
        name=f"{stem}.{suffix}",
        shape=shape[::-1] if transposed else shape,
        path=path,
        layer=layer,
        transposed=transposed,
    )


def is_ignored(name: str, *, tied: bool) -> bool:
    """Whether a checkpoint may hold this tensor though the decoder does not need it: tables that can be computed."""
    return bool(re.search(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", name)) or (
        tied and name == "lm_head.weight"
    )
