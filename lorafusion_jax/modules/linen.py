"""LoRA on Linen models as they are: the adapters live in a collection of their own beside "params".

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from lorafusion_jax.adapters.kind import leaves_of
from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.modules.adapted import lora_product
from lorafusion_jax.modules.bank import low_rank_bank
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.init import init_bank
from lorafusion_jax.modules.linear import HEADS
from lorafusion_jax.modules.match import name_matches
from lorafusion_jax.modules.product import exchange_product, unsupported_linear
from lorafusion_jax.modules.spec import ALL_LINEAR, AdapterSpec

COLLECTION = "LoRAParam"
KERNELS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Dense, "kernel"),
    (nn.DenseGeneral, "kernel"),
    (nn.Einsum, "kernel"),
)


class LinenLoRA:
    """Adapters for a Linen model, which stays as it is; checkpoints of the base load unchanged.

    Args:
        adapters: in stacking order; their ranks, scales, dropout, kinds and targets count.
        targets: for all adapters, in place of their own: "all-linear" (every linear layer but the output head), names,
            globs or regular expressions of whole paths ("block_0.attn.query").
        modules: (class, name of its weight) of linear modules of your own besides `Dense`, `DenseGeneral` and
            `Einsum`, which must multiply by that weight once.

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
        modules: Sequence[tuple[type[nn.Module], str]] = (),
    ):
        names = [spec.name for spec in adapters]
        if not adapters or len(set(names)) < len(names):
            raise ConfigError("lora.adapters", f"adapters need one or more different names, got {names}.")
        self.adapters, self.kinds = tuple(adapters), tuple(spec.kind for spec in adapters)
        given = None if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        self.targets = {spec.name: given or spec.targets for spec in adapters}
        self.modules = (*modules, *KERNELS)

    def init(self, model: nn.Module, variables: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Draws the adapters of a model: the tree of the collection "LoRAParam".

        Args:
            model: its `apply` is traced once, with no computation.
            variables: of the base; shapes are enough.
            args: of the call.
            options: of the call.

        Raises:
            ConfigError: `lora.unknown-target`, a target matches no layer that ran; `lora.unsupported-linear`.
        """
        drawn: dict[tuple[str, ...], dict[str, Any]] = {}
        seen: list[str] = []

        def draw(module: nn.Module, x: Array, w: Array, inside: tuple[int, ...]) -> Array:
            path = tuple(module.path)
            free = [axis for axis in range(w.ndim) if axis not in inside]
            seen.append(".".join(path))
            if not _stored(variables, path, w):
                raise unsupported_linear(
                    seen[-1], "its weight is stacked by nn.scan or nn.vmap", "unroll it, or use an NNX model"
                )
            if path not in drawn and (members := self._members(path)):
                k, n = (_product(w.shape, axes) for axes in (inside, free))
                rank = max(self.adapters[index].rank for index in members)
                drawn[path] = init_bank(self.adapters, ".".join(path), k, n, rank, members)
            return jnp.tensordot(x, w, axes=(tuple(range(x.ndim - len(inside), x.ndim)), inside))

        def run(variables: Any, *args: Any) -> Any:
            with self._intercept(draw, all_layers=True):
                return model.apply(variables, *args, mutable=True, **options)

        jax.eval_shape(run, variables, *args)
        self._check_targets(seen)
        tree: dict[str, Any] = {}
        for path, bank in drawn.items():
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node.update({name: jnp.asarray(leaf) for name, leaf in bank.items()})
        return tree

    @contextmanager
    def use(self, table: Any = None, **options: Any) -> Iterator[None]:
        """Within it, `model.apply` computes with the adapters of its collection "LoRAParam".

        Enter it inside the function that is jitted.

        Args:
            table: as in `use_adapters`.
            options: as there: `step=` in training with dropout, `train=False`, `only=`.

        Raises:
            RunError: `lora.no-collection`: "LoRAParam" is not among the variables.
        """
        context, ran = LoRAContext.of(self.adapters, table, **options), []

        def multiply(module: nn.Module, x: Array, w: Array, inside: tuple[int, ...]) -> Array:
            ran.append(module)
            leaves = {leaf.name: module.get_variable(COLLECTION, leaf.name) for leaf in leaves_of(self.kinds)}
            if any(value is None for value in leaves.values()):
                raise _missing(module)
            a_AKR, b_ARN = low_rank_bank(self.kinds, leaves)
            site = zlib.crc32(".".join(module.path).encode()) >> 1
            return lora_product(x, w, a_AKR, b_ARN, inside, context, site)

        with self._intercept(multiply, all_layers=False):
            yield
        if not ran:
            raise RunError(
                "lora.context-unused",
                "no layer with adapters ran inside `use`.",
                why="a jitted function that is already compiled does not see it",
                fix="enter it inside the jitted function, around model.apply",
            )

    @contextmanager
    def _intercept(self, product: Any, *, all_layers: bool) -> Iterator[None]:
        inner = False  # the call of an unbound copy is not to be intercepted again

        def interceptor(call: Any, args: Any, options: Any, context: Any) -> Any:
            nonlocal inner
            module = context.module
            weight = next((name for cls, name in self.modules if isinstance(module, cls)), None)
            if inner or weight is None or context.method_name != "__call__" or module.scope is None:
                return call(*args, **options)
            if not (all_layers or self._members(tuple(module.path))):
                return call(*args, **options)
            params = dict(module.variables.get("params", {}))
            if weight not in params:
                raise unsupported_linear(
                    ".".join(module.path), f"it has no parameter '{weight}' yet", "init the base model first"
                )
            w = nn.meta.unbox(params[weight])

            def own_call(w: Array) -> Any:
                nonlocal inner
                inner = True
                try:
                    return module.clone(parent=None).apply({"params": {**params, weight: w}}, *args, **options)
                finally:
                    inner = False

            def own_product(x: Array, w: Array, inside: tuple[int, ...]) -> Array:
                return product(module, x, w, inside)

            return exchange_product(own_call, w, own_product, where=".".join(module.path))

        with nn.intercept_methods(interceptor):
            yield

    def _members(self, path: tuple[str, ...]) -> list[int]:
        """Numbers of the adapters that target a layer."""
        return [
            index
            for index, targets in enumerate(self.targets.values())
            if any(self._matches(target, path) for target in targets)
        ]

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


def _stored(variables: Any, path: tuple[str, ...], w: Array) -> bool:
    """Whether a weight of this size is what the variables hold for a module."""
    node = nn.meta.unbox(variables)["params"]
    for part in path:
        node = node[part]
    return any(jnp.shape(leaf) == w.shape for leaf in jax.tree.leaves(node))


def _product(shape: Sequence[int], axes: Sequence[int]) -> int:
    size = 1
    for axis in axes:
        size *= shape[axis]
    return size


def _missing(module: nn.Module) -> RunError:
    return RunError(
        "lora.no-collection",
        f'the collection "{COLLECTION}" has no adapters for this layer.',
        where=".".join(module.path),
        fix=f'model.apply({{"params": params, "{COLLECTION}": adapters}}, …); under nn.scan or nn.vmap '
        f'variable_axes={{"params": 0, "{COLLECTION}": 0}}',
    )
