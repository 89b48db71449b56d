"""LoRA on unchanged Linen models: the adapters are a separate collection of variables next to "params".

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from lorafusion_jax.adapters.spec import ALL_LINEAR, AdapterSpec, refuse_only_in_runs
from lorafusion_jax.adapters.table import adapter_kind, leaves_of
from lorafusion_jax.errors import ConfigError, RunError, first_few, raise_all
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.linen_held import HeldLayer, LinenAdapters, copy_dicts, node_at
from lorafusion_jax.modules.linen_intercept import COLLECTION, SITE, Kinds, adapters_of, intercept, weights_of
from lorafusion_jax.modules.linen_layers import (
    KERNELS,
    LinenLayer,
    Ran,
    find_layers,
    frozen_multiply,
    has_stored_weight,
)
from lorafusion_jax.modules.lora_product import Leaves, expert_products, lora_product
from lorafusion_jax.modules.match import EXPERTS, name_matches, unknown_names
from lorafusion_jax.modules.plan import LoRAPlan
from lorafusion_jax.modules.product import Result
from lorafusion_jax.modules.report import LoRAReport, report_ran
from lorafusion_jax.modules.stored_weight import StoredWeight
from lorafusion_jax.modules.storing import check_mesh, store
from lorafusion_jax.modules.unmatched import all_excluded, describe_left_out, unknown_target
from lorafusion_jax.modules.use import SHOWN, check_inside, staging, traced_anew
from lorafusion_jax.modules.weights import (
    adapter_arrays,
    load_adapter,
    merged_weight,
    only_adapter,
    put_adapter_arrays,
    refuse_bypassed,
    save_adapter,
)
from lorafusion_jax.weights.table import check_kernels, stored_kind


class LinenLoRA:
    """Adapters for a Linen model. The model and checkpoints of its base do not change.

    Layers may run under `nn.scan`, `nn.vmap`, `nn.remat` and `nn.jit`. A stack of layers has stacked adapters. So has
    a layer with a weight for each expert ("ebd,edf->ebf"), which takes adapters if a target names it.

    Args:
        adapters: in stacking order.
        targets: targets for all adapters, instead of their own: "all-linear" (every linear layer but the output head),
            names, globs or regular expressions of whole paths ("block_0.attn.query").
        modules: linear modules that are not recognised: pairs of a class and the name of its weight, the names of
            several, or a function from a module to them. They must multiply by each weight once, or by each of its
            parts `w[0]`, `w[1]` once, whose adapters are stacked. `Dense`, `DenseGeneral` and `Einsum` are known, and
            so is a module of any other class whose call is one product with its only matrix.
        heads: names of the output heads, which "all-linear" leaves out (None: the last layer as wide as the vocabulary;
            in a model without embeddings, a layer that is called head, lm_head, logits or classifier).
        exclude: names, globs or regular expressions of layers that no target reaches: "all-linear" but these.

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
    ...     with lora.use(table) as context:
    ...         return context.mean(model.apply({"params": params, "LoRAParam": adapters}, x) ** 2).sum()
    >>> grads = jax.grad(loss)(adapters, jnp.array([0, 1, 1]))
    """

    def __init__(
        self,
        adapters: Sequence[AdapterSpec],
        *,
        targets: str | Sequence[str] | None = None,
        modules: Kinds = (),
        heads: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
    ):
        names = [spec.name for spec in adapters]
        if not adapters or len(set(names)) < len(names):
            raise ConfigError("lora.adapters", f"adapters need one or more different names, got {names}.")
        refuse_only_in_runs(adapters)
        self.adapters, self.kinds = tuple(adapters), tuple(spec.kind for spec in adapters)
        target_names = None if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        self.targets = {spec.name: target_names or spec.targets for spec in adapters}
        self.heads = (heads,) if isinstance(heads, str) else None if heads is None else tuple(heads)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._modules = (*modules, *KERNELS)
        self._axes = {leaf.name: len(leaf.axes) for leaf in leaves_of(self.kinds)}
        self._plans: dict[tuple[str, ...], LoRAPlan] = {}

    def init(self, model: nn.Module, variables: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Draws the adapters of a model: the tree of the collection "LoRAParam".

        Args:
            model: its `apply` is traced once, with no computation.
            variables: variables of the base; shapes are enough, unless a kind starts from the weights.
            args: arguments of the call.
            options: keyword arguments of the call.

        Returns:
            A dictionary like that of the parameters. For LoRA a layer has `lora_a` [A, K, R] and `lora_b` [A, R, N]; a
            stack of L layers has [L, A, K, R] and [L, A, R, N].

        Raises:
            ConfigError: `lora.start`, see `variables`; `lora.unknown-target`, a target matches no layer that ran;
                `lora.unsupported-linear`.

        Warns:
            UserWarning: a pattern or "all-linear" matches modules that cannot carry LoRA; lists them.
        """
        layers = self._plan(self._run(model, variables, args, options))
        largest = max(layer.in_features for layer in layers), max(layer.out_features for layer in layers)
        tree: dict[str, Any] = {}
        for layer in layers:
            plan = self._plans[layer.path]
            leaves = plan.start(largest, lambda layer=layer: _weight(layer, variables))
            node_at(tree, layer.path).update(leaves)
        return tree

    @contextmanager
    def use(self, table: Any = None, **options: Any) -> Iterator[LoRAContext]:
        """Makes `model.apply` in its body use the adapters of the collection "LoRAParam".

        Its value is the context, as that of `use_adapters`. Enter it inside the jitted function.

        Args:
            table: as in `use_adapters`.
            options: as in `use_adapters`: `step=` in training with dropout, `train=False`, `only=`.

        Raises:
            RunError: `lora.no-collection`, "LoRAParam" is not among the variables; `lora.context-outside-jit`.
        """
        context, staged, ran = LoRAContext.of(self.adapters, table, **options), staging(), []

        def wanted(module: nn.Module) -> bool:
            names = weights_of(module, self._modules)
            return any(has_adapters(module, name) for name in names) or has_stored_weight(module, self._modules)

        def has_adapters(module: nn.Module, weight: str) -> bool:
            # A module that is applied separately to shared weights has no path in the tree, so it has no adapters.
            path, leaves = adapters_of(module, weight)
            return leaves is not None or (bool(path) and path in self._plans)

        def multiply(
            module: nn.Module, weight: str, x: Array, w: Array, inside: tuple[int, ...], result: Result
        ) -> Array:
            if not has_adapters(module, weight):
                return frozen_multiply(x, w, inside, result)
            check_inside(staged)
            ran.append(module)
            path, leaves = adapters_of(module, weight)
            linear = LinenLayer(weight="", shape=w.shape, inside=inside, scope=path, path=path, kind="")
            multiply_by = expert_products if result.experts else lora_product
            plan = LoRAPlan.of(".".join(path), linear, self.adapters, self._members(path))
            if leaves is None or any(name not in leaves for name in plan.leaf_names):
                raise _missing_collection(module)
            leaves = {name: leaf[result.part] for name, leaf in leaves.items()}
            bank = Leaves(names=plan.names, numbers=plan.numbers, leaves=leaves, rank=plan.rank)
            site = leaves[SITE] if SITE in leaves else int(plan.sites)
            return multiply_by(x, w, bank, inside, result, context=context, site=site, where=plan.path)

        with traced_anew(), intercept(self._modules, wanted, multiply, axes=self._axes):
            yield context
        if not ran:
            raise RunError(
                "lora.context-unused",
                "no layer with adapters ran inside `use`.",
                why=f'a compiled function does not see it; and without the collection "{COLLECTION}" there are none',
                fix="enter it inside the jitted function, around model.apply",
            )

    def report(self, model: nn.Module, variables: Any, *args: Any, **options: Any) -> LoRAReport:
        """Reports which layers have adapters, and why others have none, like `lora_report`; arguments as in `init`."""
        ran = self._run(model, variables, args, options)
        return report_ran(ran, {layer.path: self._plan_of(layer) for layer in ran.layers}, variables["params"])

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
        layers = [layer for layer in self._run(model, variables, args, options).layers if self._is_stored(layer)]
        return quantise_params(variables["params"], layers, quantize)

    def merge(
        self,
        model: nn.Module,
        variables: Any,
        adapters: Any,
        name: str,
        *args: Any,
        allow_uncalled: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Returns the base parameters with one adapter merged: W + scale · A B, rounded once to the dtype of W.

        Args:
            model: its `apply` is traced once, with no computation.
            variables: variables of the base; not changed.
            adapters: the collection "LoRAParam".
            name: name of the adapter.
            args: arguments of the call.
            allow_uncalled: merge layers, too, whose weights something else reads: `nn.WeightNorm`, a parent. Whoever
                reads them then computes with the adapter, unlike before.
            options: keyword arguments of the call.

        Raises:
            ConfigError: `lora.unknown-adapter`; `lora.merge-quantized`, the parameters are those of `quantize_base`;
                `lora.uncalled`, see `allow_uncalled`.
        """
        check_plain(variables["params"])
        index = self._number(name)
        spec, params = self.adapters[index], copy_dicts(variables["params"])
        ran = self._run(model, variables, args, options)
        layers = [layer for layer in ran.layers if index in self._members(layer.path, layer)]
        if not allow_uncalled:
            refuse_bypassed([layer.name for layer in layers if layer.name in ran.read], "LinenLoRA.merge")
        for layer in layers:
            node, stack = node_at(adapters, layer.path), len(layer.stack)
            leaves = {
                leaf.name: np.take(np.asarray(node[leaf.name]), index, stack) for leaf in adapter_kind(spec.kind).leaves
            }
            weights = node_at(params, layer.scope)
            boxed = weights[layer.weight]
            merged = merged_weight(nn.meta.unbox(boxed), spec, leaves, layer.inside, stack)
            weights[layer.weight] = nn.meta.replace_boxed(boxed, merged)
        return params

    def hold(self, adapters: Any) -> LinenAdapters:
        """Returns the adapters as an NNX model, for `lf.save_peft`, `lf.load_peft`, `lf.save_checkpoint` and others.

        >>> import jax
        >>> model, x = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)]), jnp.ones((3, 8))
        >>> shapes = jax.eval_shape(model.init, jax.random.key(0), x)
        >>> lora = LinenLoRA([AdapterSpec(name="law", rank=8, alpha=16)], targets="all-linear")
        >>> held = lora.hold(lora.init(model, shapes, x))
        >>> sorted(adapter_arrays(held, "law"))[:2]
        ['layers_0.lora_a', 'layers_0.lora_b']
        >>> adapters = held.tree()

        Args:
            adapters: the collection "LoRAParam" of a model that `init` has seen.

        Raises:
            ConfigError: `lora.no-init`.
        """
        if not self._plans:
            fix = "lora.init(model, variables, …) before; shapes of the variables are enough"
            raise ConfigError("lora.no-init", "this LinenLoRA has not seen its model.", fix=fix)
        return LinenAdapters([HeldLayer(plan, path, node_at(adapters, path)) for path, plan in self._plans.items()])

    def adapter_arrays(self, adapters: Any, name: str) -> dict[str, np.ndarray]:
        """Returns one adapter's tensors at its own rank, "block_0.up.lora_a" → [K, r], for saving in any format.

        Raises:
            ConfigError: `lora.unknown-adapter`, `lora.no-init`.
        """
        return adapter_arrays(self.hold(adapters), name)

    def put_adapter_arrays(self, adapters: Any, name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the adapters with one replaced by tensors from `adapter_arrays`.

        Raises:
            ConfigError: `lora.unknown-adapter`, `lora.no-init`.
            CheckpointError: `lora.misfit`.
        """
        put_adapter_arrays(holder := self.hold(adapters), name, arrays)
        return holder.tree()

    def save_adapter(self, adapters: Any, name: str, folder: str | Path) -> Path:
        """Writes one adapter to `folder/adapter.safetensors`, see `save_adapter`."""
        return save_adapter(self.hold(adapters), name, folder)

    def load_adapter(self, adapters: Any, name: str, folder: str | Path) -> dict[str, Any]:
        """Returns the adapters with one replaced by a file from `save_adapter`."""
        load_adapter(holder := self.hold(adapters), name, folder)
        return holder.tree()

    def only_adapter(self, adapters: Any, name: str) -> tuple[LinenLoRA, dict[str, Any]]:
        """Returns one adapter alone, at its own rank: a `LinenLoRA` of it and its collection "LoRAParam"."""
        only_adapter(holder := self.hold(adapters), name)
        spec, modules = self.adapters[self._number(name)], self._modules[: -len(KERNELS)]
        alone = LinenLoRA([spec], targets=self.targets[name], modules=modules, heads=self.heads, exclude=self.exclude)
        alone._plans = {layer.path: layer.lora_plan for layer in holder.layers if hasattr(layer, "lora_plan")}
        return alone, holder.tree()

    def _run(self, model: nn.Module, variables: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Ran:
        return find_layers(model, variables, self._modules, args, options, heads=self.heads)

    def _plan(self, ran: Ran) -> list[LinenLayer]:
        """Plans the adapters of the layers that ran, and returns the layers that have some."""
        self._check_targets(ran)
        plans = {layer.path: plan for layer in ran.layers if (plan := self._plan_of(layer)) is not None}
        self._plans = plans
        if read := [layer.name for layer in ran.layers if layer.path in plans and layer.name in ran.read]:
            warnings.warn(
                f"[lora.uncalled] something else reads the weights of adapted layers: {first_few(read, SHOWN)}. Their "
                "adapters have no effect and no gradient there. fix: LinenLoRA(…, exclude=…)",
                UserWarning,
                stacklevel=4,
            )
        return [layer for layer in ran.layers if layer.path in plans]

    def _plan_of(self, layer: LinenLayer) -> LoRAPlan | None:
        members = self._members(layer.path, layer)
        return LoRAPlan.of(layer.name, layer, self.adapters, members) if members else None

    def _is_stored(self, layer: LinenLayer) -> bool:
        return not (layer.experts or layer.parts) and (not layer.is_head or bool(self._members(layer.path, layer)))

    def _number(self, name: str) -> int:
        names = [spec.name for spec in self.adapters]
        if name not in names:
            fix = f"one of [{', '.join(names)}]"
            raise ConfigError("lora.unknown-adapter", f"there is no adapter '{name}'.", fix=fix)
        return names.index(name)

    def _members(self, path: tuple[str, ...], layer: LinenLayer | None = None) -> list[int]:
        """Returns the indices of the adapters that target a layer."""
        if layer is None and path in self._plans:
            return list(self._plans[path].members)
        return [
            index
            for index, targets in enumerate(self.targets.values())
            if any(self._matches(target, path, layer) for target in targets)
        ]

    def _is_excluded(self, name: str) -> bool:
        return any(name_matches(pattern, name) for pattern in self.exclude)

    def _matches(self, target: str, path: tuple[str, ...], layer: LinenLayer | None) -> bool:
        if self._is_excluded(".".join(path)):
            return False
        if target == ALL_LINEAR:
            return layer is None or not (layer.is_head or layer.experts)
        return name_matches(target, ".".join(path))

    def _check_targets(self, ran: Ran) -> None:
        paths = [module.name for module in (*ran.layers, *ran.others)]
        raise_all(unknown_names("exclude", self.exclude, paths) + unknown_names("heads", self.heads or (), paths))
        left_out: dict[str, tuple[str, str, str]] = {}
        for target in dict.fromkeys(target for targets in self.targets.values() for target in targets):
            others = [module for module in ran.others if target == ALL_LINEAR and not module.is_table]
            others += [module for module in ran.others if target != ALL_LINEAR and name_matches(target, module.name)]
            if not any(self._matches(target, layer.path, layer) for layer in ran.layers):
                excluded = [layer.name for layer in ran.layers if self._is_excluded(layer.name)]
                if paths := [name for name in excluded if target == ALL_LINEAR or name_matches(target, name)]:
                    raise all_excluded(target, paths)
                refused = [(module.name, module.kind, module.why) for module in (others or ran.others)]
                raise unknown_target(target, [layer.name for layer in ran.layers], refused)
            left_out |= {module.name: (module.name, module.kind, module.why) for module in others}
            if target == ALL_LINEAR:
                left_out |= {layer.name: (layer.name, layer.kind, EXPERTS) for layer in ran.layers if layer.experts}
        if rows := [row for name, row in left_out.items() if not self._is_excluded(name)]:
            warnings.warn(describe_left_out(rows), UserWarning, stacklevel=4)


def _weight(layer: LinenLayer, variables: Any) -> Array:
    w = nn.meta.unbox(node_at(copy_dicts(variables["params"]), layer.scope)[layer.weight])
    if isinstance(w, jax.Array | np.ndarray):
        return jnp.asarray(w)
    raise ConfigError(
        "lora.start",
        "the adapters start from the weight, which is not among the variables.",
        where=layer.name,
        fix="init(model, variables, …) with the weights of the base, not their shapes",
    )


def _missing_collection(module: nn.Module) -> RunError:
    return RunError(
        "lora.no-collection",
        f'the collection "{COLLECTION}" has no adapters for this layer.',
        where=".".join(module.path),
        fix=f'model.apply({{"params": params, "{COLLECTION}": adapters}}, …)',
    )


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
