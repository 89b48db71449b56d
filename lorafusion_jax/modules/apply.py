"""LoRA on any NNX model: its `nnx.Linear` layers get the weights of many adapters.

K in · N out · R padded rank · A adapters
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from lorafusion_jax.adapters.kind import leaves_of
from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.modules.bank import low_rank_bank
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.init import init_bank
from lorafusion_jax.modules.match import find_linears
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.modules.tree import Path, dotted, replace_modules
from pallas_kernels import lora_linear, multi_lora_linear


@dataclass(slots=True)
class _Use:
    context: LoRAContext
    staged: bool  # entered while a jitted function was being traced
    seen: bool = False


_current: ContextVar[_Use | None] = ContextVar("lorafusion_adapters", default=None)


def apply_lora(
    model: nnx.Module,
    adapters: Sequence[AdapterSpec],
    *,
    targets: str | Sequence[str] | None = None,
    allow_partial: bool = False,
) -> nnx.Module:
    """Turns linear layers of a model into LoRA layers, in place; the frozen kernels are shared, not copied.

    y[t] = x[t] W + bias + scale[k] · (x[t] A[k]) B[k],  k = 0 unless `use_adapters` says otherwise

    The trainable leaves are `nnx.LoRAParam`s [A, K, R] and [A, R, N]; B starts at zero, so the model computes what it
    did before.

    Args:
        model: any NNX model with `nnx.Linear` layers, nested in attributes, lists, dicts or tuples.
        adapters: one or more; their own `targets` count unless `targets` is given.
        targets: for all adapters: "all-linear", names ("q_proj", "attn.query") or regular expressions of whole paths.
        allow_partial: accepts a target that is present in some layers only.

    Returns:
        The model (a new layer if the model is itself a linear layer).

    Raises:
        ConfigError: every target that matches nothing (with the names there are) or some layers only, and every
            layer that cannot carry LoRA.

    >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    >>> model = apply_lora(model, [AdapterSpec(name="law", rank=2, alpha=4)], targets="all-linear")
    >>> graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    >>> def loss(lora, x):
    ...     return (nnx.merge(graph, lora, frozen)(x) ** 2).sum()
    >>> grads = nnx.grad(loss)(lora, jnp.ones((3, 8)))
    >>> grads["layers"][0]["lora_b"].shape
    (1, 2, 16)
    """
    names = [spec.name for spec in adapters]
    if not adapters or len(set(names)) < len(names):
        raise ConfigError("lora.adapters", f"adapters need one or more different names, got {names}.")
    wanted = None if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
    found = find_linears(model, {spec.name: wanted or spec.targets for spec in adapters}, allow_partial=allow_partial)
    new = {
        id(linear): AdaptedLinear(linear, adapters, path, [names.index(name) for name in members])
        for path, (linear, members) in found.items()
    }
    return replace_modules(model, new)


@contextmanager
def use_adapters(context: LoRAContext) -> Iterator[None]:
    """Tells the layers made by `apply_lora` which adapter each row belongs to.

    Enter it inside the function that is jitted, with the table as an argument of that function:

    >>> model = apply_lora(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), specs := [
    ...     AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=4, alpha=4)], targets=".*")
    >>> @nnx.jit
    ... def forward(model, x, adapter_of_example):
    ...     with use_adapters(LoRAContext.of(specs, adapter_of_example)):
    ...         return model(x)
    >>> forward(model, jnp.ones((3, 5, 8)), jnp.array([0, 1, 1])).shape
    (3, 5, 4)

    Args:
        context: `LoRAContext.of(adapters, tile_adapter)`; without row keys there is no dropout.

    Raises:
        RunError: `lora.context-outside-jit` or `lora.context-unused`: entered around a jitted function, which would
            keep the table of its first call; `lora.other-adapters`: not as many adapters as the model has.
    """
    use = _Use(context, _staging())
    token = _current.set(use)
    try:
        yield
    finally:
        _current.reset(token)
    if not use.seen:
        raise RunError(
            "lora.context-unused",
            "no LoRA layer ran inside `use_adapters`.",
            why="a jitted function that is already compiled does not see it",
            fix=_INSIDE,
        )


_INSIDE = "enter `use_adapters` inside the jitted function, and pass the table as an argument"


class AdaptedLinear(nnx.Linear):
    """An `nnx.Linear` that has got adapters; made by `apply_lora`.

    Args:
        linear: its kernel and bias variables are taken over.
        adapters: in stacking order.
        path: of the layer in its model; decides initial weights and dropout.
        members: indices of the adapters that target this layer.
    """

    def __init__(self, linear: nnx.Linear, adapters: Sequence[AdapterSpec], path: Path, members: Sequence[int]):
        for name, value in vars(linear).items():
            if not name.startswith("_pytree__"):
                setattr(self, name, nnx.data(None) if name == "bias" and value is None else value)
        self.rank = max(adapters[index].rank for index in members)
        self.scale, self.site = adapters[0].scale, zlib.crc32(dotted(path).encode()) >> 1
        self.kinds = tuple(spec.kind for spec in adapters)
        bank = init_bank(adapters, dotted(path), linear.in_features, linear.out_features, self.rank, members)
        for name, leaf in bank.items():
            setattr(self, name, nnx.LoRAParam(jnp.asarray(leaf)))

    def __call__(self, inputs: Float[Array, "*B K"], out_sharding: None = None) -> Float[Array, "*B N"]:
        """Applies the frozen layer and the adapter of each row."""
        if out_sharding is not None:
            raise NotImplementedError("a LoRA layer does not take out_sharding")
        bias = None if self.bias is None else self.bias[...]
        x, w_KN, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        leaves = {leaf.name: getattr(self, leaf.name)[...] for leaf in leaves_of(self.kinds)}
        a_AKR, b_ARN = low_rank_bank(self.kinds, leaves)
        context = _context()
        if context is None:
            return lora_linear(x, w_KN, a_AKR[0], b_ARN[0], scale=self.scale, bias=bias)
        if len(context.scale) != len(a_AKR):
            raise RunError(
                "lora.other-adapters",
                f"the context is of {len(context.scale)} adapters and the model has {len(a_AKR)}.",
                fix="LoRAContext.of: the adapters that apply_lora got, in the same order",
            )
        return multi_lora_linear(
            x,
            w_KN,
            a_AKR,
            b_ARN,
            tile_adapter=context.tile_adapter,
            scale=context.scale,
            dropout=context.at_site(self.site),
            bias=bias,
            implementation=context.implementation,
        )


def _context() -> LoRAContext | None:
    use = _current.get()
    if use is None:
        return None
    if _staging() and not use.staged:
        raise RunError(
            "lora.context-outside-jit",
            "`use_adapters` was entered outside the function that is compiled.",
            why="the compiled function would keep this table for ever",
            fix=_INSIDE,
        )
    use.seen = True
    return use.context


def _staging() -> bool:
    """True while a function is being traced for compilation (arrays made now are tracers), False under grad alone."""
    return isinstance(jnp.zeros(()), Tracer)
