"""The frozen weights of a Linen model in fewer bytes, in place of the arrays of its collection "params"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
from flax.traverse_util import flatten_dict

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.linen_held import copy_dicts, node_at
from lorafusion_jax.modules.linen_layers import LinenLayer
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.modules.storing import check_mesh, store
from lorafusion_jax.weights.table import check_kernels, stored_kind


def quantise_params(params: Any, layers: Sequence[LinenLayer], quantize: str) -> dict[str, Any]:
    """Stores the weights of these layers, one after another. The given tree does not change.

    Raises:
        ConfigError: see `LinenLoRA.quantize_base`.
    """
    if stored_kind(quantize) is None:
        return params
    if (where := _first_stored(params)) is not None:
        raise ConfigError("lora.quantized", "its weight is stored in fewer bytes already.", where=where)
    stored = copy_dicts(params)
    weights = {(layer.scope, layer.weight): layer for layer in layers}
    for (scope, name), layer in weights.items():
        check_mesh(nn.meta.unbox(node_at(stored, scope)[name]), layer, len(layer.stack), quantize, layer.name)
    check_kernels(quantize, {layer.name: (layer.in_features, layer.out_features) for layer in weights.values()})
    for (scope, name), layer in weights.items():
        node = node_at(stored, scope)
        node[name] = store(nn.meta.unbox(node[name]), layer, len(layer.stack), quantize)
    return stored


def check_plain(params: Any) -> None:
    """Checks that no weight is stored in fewer bytes.

    Raises:
        ConfigError: `lora.merge-quantized`.
    """
    if (where := _first_stored(params)) is not None:
        raise ConfigError(
            "lora.merge-quantized",
            "the weight is stored in fewer bytes, and an adapter cannot be merged into it without rounding.",
            where=where,
            fix="merge into the parameters that quantize_base got",
        )


def _first_stored(params: Any) -> str | None:
    """Returns the path of the first layer whose weight is stored in fewer bytes."""
    leaves = flatten_dict(copy_dicts(params)).items()
    return next((".".join(path[:-1]) for path, leaf in leaves if isinstance(leaf, StoredWeight)), None)
