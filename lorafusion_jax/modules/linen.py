"""LoRA on unchanged Linen models: the adapters are a separate collection of variables next to "params".

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from lorafusion_jax.adapters.bank import kind_numbers, start_bank
from lorafusion_jax.adapters.init import init_bank
from lorafusion_jax.adapters.spec import ALL_LINEAR, AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind, leaves_of
from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.linear import HEADS
from lorafusion_jax.modules.linen_layers import (
    KERNELS,
    Kinds,
    LinenLayer,
    find_layers,
    frozen_multiply,
    has_stored_weight,
    intercept,
    weight_of,
)
from lorafusion_jax.modules.linen_quantised import check_plain, quantise_params
from lorafusion_jax.modules.linen_tree import copy_dicts, node_at
from lorafusion_jax.modules.lora_product import Leaves, lora_product
from lorafusion_jax.modules.match import name_matches
from lorafusion_jax.modules.merging import merged_weight
from lorafusion_jax.modules.product import Result
from lorafusion_jax.modules.use import check_inside, staging, traced_anew

COLLECTION = "LoRAParam"
_HEADS = {(name,) for name in HEADS}


class LinenLoRA:
    """Adapters for a Linen model. The model and checkpoints of its base do not change.

    Args:
        adapters: in stacking order.
        targets: targets for all adapters, instead of their own: "all-linear" (every linear layer but the output head),
            names, globs or regular expressions of whole paths ("block_0.attn.query").
        modules: your own linear modules, besides `Dense`, `DenseGeneral` and `Einsum`: pairs of a class and the name of
            its weight, or a function from a module to that name. They must multiply by this weight once.

    >>> import jax
    >>> model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
    >>> x = jnp.ones((3, 5, 8))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> specs = [AdapterSpec(name="law", rank=8, alpha=16), AdapterSpec(name="med", rank=4, alpha=4)]
    >>> lora = LinenLoRA(specs, targets="all-linear")
    >>> adapters = lora.init(model, {"params": params}, x)
    >>> adapters["layers_0"]["lora_a"].shape
    (2, 8, 8)
    >>> def loss(adapters, table):
    ...     with lora.use(table):
    ...         return jnp.mean(model.apply({"params": params, "LoRAParam": adapters}, x) ** 2)
    >>> grads = jax.grad(loss)(adapters, jnp.array([0, 1, 1]))
    """

    def __init__(
        self,
        adapters: Sequence[AdapterSpec],
        *,
        targets: str | Sequence[str] | None = None,
        modules: Kinds = (),
    ):
        names = [spec.name for spec in adapters]
        if not adapters or len(set(names)) < len(names):
            raise ConfigError("lora.adapters", f"adapters need one or more different names, got {names}.")
        self.adapters, self.kinds = tuple(adapters), tuple(spec.kind for spec in adapters)
        given = None if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        self.targets = {spec.name: given or spec.targets for spec in adapters}
        self._modules = (*modules, *KERNELS)

    def init(self, model: nn.Module, variables: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Draws the adapters of a model: the tree of the collection "LoRAParam".

        Args:
            model: its `apply` is traced once, with no computation.
            variables: variables of the base; shapes are enough, unless a kind starts from the weights.
            args: arguments of the call.
            options: keyword arguments of the call.

        Raises:
            ConfigError: `lora.start`, see `variables`; `lora.unknown-target`, a target matches no layer that ran;
                `lora.unsupported-linear`.
        """
        layers = find_layers(model, variables, self._modules, args, options)
        self._check_targets([layer.name for layer in layers])
        adapted = [layer for layer in layers if self._members(layer.path)]
        largest = max(it.in_features for it in adapted), max(it.out_features for it in adapted)
        tree: dict[str, Any] = {}
        for layer in adapted:
            members = self._members(layer.path)
            rank = max(self.adapters[index].rank for index in members)
            sizes = (layer.in_features, layer.out_features)
            bank = init_bank(self.adapters, layer.name, *sizes, rank, members, largest)
            node_at(tree, layer.path).update(self._started(layer, variables, bank))
        return tree

    def _started(self, layer: LinenLayer, variables: Any, bank: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """Keeps the tensors of the layer's kinds and fills in initial values that depend on the kernel."""
        names, numbers = self._kinds_of(layer.path)
        leaves = {leaf.name: jnp.asarray(bank[leaf.name]) for leaf in leaves_of(names)}
        if not any(adapter_kind(name).start for name in names):
            return leaves
        shape = (layer.in_features, layer.out_features)
        w = nn.meta.unbox(node_at(variables["params"], layer.scope)[layer.weight])
        if not isinstance(w, (jax.Array, np.ndarray)):
            raise ConfigError(
                "lora.start",
                f"adapters of kind {', '.join(names)} start from the weight, which is not among the variables.",
                where=layer.name,
                fix="init(model, variables, …) with the weights of the base, not their shapes",
            )
        free = [axis for axis in range(w.ndim) if axis not in layer.inside]
        kernel = jnp.transpose(w, [*layer.inside, *free]).reshape(shape)
        scales = [spec.scale for spec in self.adapters]
        rank = max(self.adapters[index].rank for index in self._members(layer.path))
        return start_bank(names, numbers, leaves, kernel, shape=shape, rank=rank, scales=scales)

    @contextmanager
    def use(self, table: Any = None, **options: Any) -> Iterator[None]:
        """Makes `model.apply` in its body use the adapters of the collection "LoRAParam".

        Enter it inside the jitted function.

        Args:
            table: as in `use_adapters`.
            options: as in `use_adapters`: `step=` in training with dropout, `train=False`, `only=`.

        Raises:
            RunError: `lora.no-collection`, "LoRAParam" is not among the variables; `lora.context-outside-jit`.
        """
        context, staged, ran = LoRAContext.of(self.adapters, table, **options), staging(), []

        def wanted(module: nn.Module) -> bool:
            return has_adapters(module) or has_stored_weight(module, self._modules)

        def has_adapters(module: nn.Module) -> bool:
            # A module that is applied separately to shared weights has no path in the tree, so it has no adapters.
            path, own = self._adapters_of(module)
            return bool(self._members(path)) and bool(path or own)

        def multiply(module: nn.Module, x: Array, w: Array, inside: tuple[int, ...], result: Result) -> Array:
            if not has_adapters(module):
                return frozen_multiply(x, w, inside, result)
            check_inside(staged)
            ran.append(module)
            path, leaves = self._adapters_of(module)
            names, numbers = self._kinds_of(path)
            rank = max(self.adapters[index].rank for index in self._members(path))
            if any(leaf.name not in leaves for leaf in leaves_of(names)):
                raise _missing_collection(module)
            site = zlib.crc32(".".join(path).encode()) >> 1
            bank = Leaves(names=names, numbers=numbers, leaves=leaves, rank=rank)
            where = ".".join(path)
            return lora_product(x, w, bank, inside, result, context=context, site=site, where=where)

        with traced_anew(), intercept(self._modules, wanted, multiply):
            yield
        if not ran:
            raise RunError(
                "lora.context-unused",
                "no layer with adapters ran inside `use`.",
                why=f'a compiled function does not see it; and without the collection "{COLLECTION}" there are none',
                fix="enter it inside the jitted function, around model.apply",
            )

    def quantize_base(
        self, model: nn.Module, variables: Any, quantize: str, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Returns the base parameters with the weights of the linear layers in fewer bytes, for `apply` inside `use`.

        Every linear layer that runs is stored, with adapters or without, but the output head; see `quantize_base`. Load
        checkpoints of the base before, and place its parameters on their mesh before. Adapters do not change.

        >>> import jax
        >>> model, x = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)]), jnp.ones((3, 64))
        >>> params = model.init(jax.random.key(0), x)["params"]
        >>> lora = LinenLoRA([AdapterSpec(name="law", rank=8, alpha=16)], targets="layers_0")
        >>> adapters = lora.init(model, {"params": params}, x)
        >>> small = lora.quantize_base(model, {"params": params}, "nf4", x)
        >>> with lora.use(only="law"):
        ...     model.apply({"params": small, "LoRAParam": adapters}, x).shape
        (3, 4)

        Args:
            model: its `apply` is traced once, with no computation.
            variables: variables of the base; not changed.
            quantize: "fp8", "int8", "nf4" or "none", as `base.quantize` of a job file.
            args: arguments of the call.
            options: keyword arguments of the call.

        Raises:
            ConfigError: `lora.quantized`, weights are stored already; `lora.quantize-mesh`, a weight cannot be stored
                on the mesh where it lies; `base.quantize-shape`; `plugin.unknown`.
        """
        layers = find_layers(model, variables, self._modules, args, options)
        chosen = [layer for layer in layers if layer.path[-1:] not in _HEADS or self._members(layer.path)]
        return quantise_params(variables["params"], chosen, quantize)

    def merge(
        self, model: nn.Module, variables: Any, adapters: Any, name: str, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Returns the base parameters with one adapter merged: W + scale · A B, rounded once to the dtype of W.

        Args:
            model: its `apply` is traced once, with no computation.
            variables: variables of the base; not changed.
            adapters: the collection "LoRAParam".
            name: name of the adapter.
            args: arguments of the call.
            options: keyword arguments of the call.

        Raises:
            ConfigError: `lora.unknown-adapter`; `lora.merge-quantized`, the parameters are those of `quantize_base`.
        """
        check_plain(variables["params"])
        index = self._number(name)
        spec, params = self.adapters[index], copy_dicts(variables["params"])
        for layer in find_layers(model, variables, self._modules, args, options):
            if index not in self._members(layer.path):
                continue
            own = node_at(adapters, layer.path)
            leaves = {leaf.name: np.asarray(own[leaf.name])[index] for leaf in adapter_kind(spec.kind).leaves}
            node = node_at(params, layer.scope)
            boxed = node[layer.weight]
            merged = merged_weight(nn.meta.unbox(boxed), spec, leaves, layer.inside)
            node[layer.weight] = nn.meta.replace_boxed(boxed, merged)
        return params

    def adapter_arrays(self, adapters: Any, name: str) -> dict[str, np.ndarray]:
        """Returns one adapter's tensors at its own rank, "block_0.up.lora_a" → [K, r], for saving in any format.

        Raises:
            ConfigError: `lora.unknown-adapter`.
        """
        index = self._number(name)
        spec = self.adapters[index]
        leaves = {leaf.name: leaf for leaf in adapter_kind(spec.kind).leaves}
        return {
            ".".join(path): leaves[path[-1]].at_rank(np.asarray(value)[index], spec.rank).copy()
            for path, value in flatten_dict(adapters).items()
            if path[-1] in leaves and index in self._members(path[:-1])
        }

    def _adapters_of(self, module: nn.Module) -> tuple[tuple[str, ...], Mapping[str, Array]]:
        """Returns path and tensors of a module's adapters. If modules share a scope, the path ends with the weight."""
        path, weight = tuple(module.path), weight_of(module, self._modules) or ""
        if isinstance(own := module.get_variable(COLLECTION, weight), Mapping):
            return (*path, weight), own
        found = {leaf.name: module.get_variable(COLLECTION, leaf.name) for leaf in leaves_of(self.kinds)}
        return path, {name: value for name, value in found.items() if value is not None}

    def _number(self, name: str) -> int:
        names = [spec.name for spec in self.adapters]
        if name not in names:
            fix = f"one of [{', '.join(names)}]"
            raise ConfigError("lora.unknown-adapter", f"there is no adapter '{name}'.", fix=fix)
        return names.index(name)

    def _members(self, path: tuple[str, ...]) -> list[int]:
        """Returns the indices of the adapters that target a layer."""
        return [
            index
            for index, targets in enumerate(self.targets.values())
            if any(self._matches(target, path) for target in targets)
        ]

    def _kinds_of(self, path: tuple[str, ...]) -> tuple[tuple[str, ...], np.ndarray | None]:
        """Returns the kinds of the adapters that target a layer, each once, and the number of each adapter's kind."""
        members = self._members(path)
        names = tuple(dict.fromkeys(self.kinds[index] for index in members))
        return names, kind_numbers(names, [kind if n in members else None for n, kind in enumerate(self.kinds)])

    def _matches(self, target: str, path: tuple[str, ...]) -> bool:
        if target == ALL_LINEAR:
            return not path or path[-1] not in HEADS
        return name_matches(target, ".".join(path))

    def _check_targets(self, seen: Sequence[str]) -> None:
        for target in dict.fromkeys(target for targets in self.targets.values() for target in targets):
            if not any(self._matches(target, tuple(path.split("."))) for path in seen):
                names = sorted({path.rsplit(".", 1)[-1] for path in seen})
                raise ConfigError(
                    "lora.unknown-target",
                    f"target '{target}' matches no linear layer that ran.",
                    fix=f"targets: {ALL_LINEAR}   or some of [{', '.join(names)}]",
                )


def _missing_collection(module: nn.Module) -> RunError:
    return RunError(
        "lora.no-collection",
        f'the collection "{COLLECTION}" has no adapters for this layer.',
        where=".".join(module.path),
        fix=f'model.apply({{"params": params, "{COLLECTION}": adapters}}, …); under nn.scan or nn.vmap '
        f'variable_axes={{"params": 0, "{COLLECTION}": 0}}',
    )
