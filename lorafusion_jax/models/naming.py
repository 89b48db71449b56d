"""Names of the decoder's frozen leaves in Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from lorafusion_jax.families.family import Family
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.per_layer_input import POSITIONS
from lorafusion_jax.families.table import family_named
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.models.decoder import Decoder
from lorafusion_jax.models.expert_files import Part, expert_parts

Path = tuple[Any, ...]
TABLES = ("embed_tokens.weight", "lm_head.weight", POSITIONS)  # whose two axes are no weight and bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a checkpoint and its leaf in the decoder.

    Attributes:
        name: name in the checkpoint.
        shape: shape in the checkpoint.
        path: path of the leaf in the decoder's state.
        transposed: linear kernels are [N, K] in the checkpoint and [K, N] here.
        parts: tensors of the checkpoint that it is made of, if it is not one of them (empty: it is).
        float32: float32 in every model dtype.
        experts: number of experts whose kernels lie in it one below the other; 0: it is one kernel.
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    transposed: bool
    parts: tuple[Part, ...] = ()
    float32: bool = False
    experts: int = 0

    @property
    def leaf_name(self) -> str:
        """Name of the leaf in the decoder: "layers.0.mlp.up_proj.kernel"."""
        return ".".join(map(str, self.path))

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


def frozen_tensors(model: Decoder) -> list[Tensor]:
    """Lists the checkpoint tensors of a decoder, concrete or abstract, in the order of its leaves."""
    family = family_named(model.config.family)
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam)))
    return [_tensor(path, leaf.shape, family, model.config) for path, leaf in leaves]


def _tensor(path: Path, shape: tuple[int, ...], family: Family, config: ModelConfig) -> Tensor:
    *modules, leaf = map(str, path)
    stem = ".".join(modules if modules[0] == "lm_head" else ["model", *modules])
    transposed = leaf == "kernel"
    parts, experts, name = (), 0, family.tensor_name(f"{stem}.{'weight' if transposed else leaf}")
    if leaf == "bias" and modules[-1] in EXPERTS:
        number = list(EXPERTS).index(modules[-1])
        name = family.tensor_name(f"model.layers.{modules[1]}.{family.expert_names[number]}_bias")
    if transposed and modules[-1] in EXPERTS:
        number = int(modules[1])
        linear = config.layer(number).linear(modules[-1])
        parts, experts = expert_parts(family, linear, number), linear.experts
    if config.norm_bias and leaf == "weight" and len(shape) == 2 and ".".join([*modules, leaf]) not in TABLES:
        names = (name, family.tensor_name(f"{stem}.bias"))
        parts = tuple(Part(name=part, shape=shape[1:], row=row) for row, part in enumerate(names))
    if transposed and family.turned:
        parts = (Part(name=name, shape=shape, turned=True),)
    return Tensor(
        name=name,
        shape=shape[::-1] if transposed else shape,
        path=path,
        transposed=transposed,
        parts=parts,
        experts=experts,
        float32=modules[0] == "layers" and _is_float32(config, int(modules[1]), ".".join([*modules[2:], leaf])),
    )


def _is_float32(config: ModelConfig, number: int, path: str) -> bool:
    return any(array.float32 and array.path == path for array in config.layer(number).arrays)
