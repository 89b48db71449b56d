"""Adds the weights of many adapters to the linear layers of any NNX model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from flax import nnx

from lorafusion_jax.adapters.spec import AdapterSpec, refuse_only_in_runs
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.adapted import adapt
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.match import check_model, find_targets
from lorafusion_jax.modules.plan import Calls
from lorafusion_jax.modules.tree import dotted
from lorafusion_jax.modules.unmatched import describe_left_out


def apply_lora(
    model: nnx.Module,
    adapters: Sequence[AdapterSpec],
    *,
    targets: str | Sequence[str] | None = None,
    allow_partial: bool = False,
    heads: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> nnx.Module:
    """Turns linear layers of a model into LoRA layers, in place. The frozen kernels are shared, not copied.

    y[t] = x[t] W + bias + scale[k] · (x[t] A[k]) B[k],  k = adapter of row t, see `use_adapters`

    Linear layers are `nnx.Linear`, `nnx.LinearGeneral` (so `nnx.MultiHeadAttention`) and `nnx.Einsum`, their
    subclasses, classes from `register_linear`, and modules with one matrix and its equation in an attribute, also in
    stacks made by `nnx.vmap`. A weight with one matrix per expert, `ebd,edf->ebf`, takes LoRA if a target names it.

    The trainable leaves are `nnx.LoRAParam`s: `lora_a` [A, K, R] and `lora_b` [A, R, N], or those of other kinds. K is
    the product of the axes that the layer sums over, N that of its output axes. B starts at zero, so at first the
    model's output does not change.

    Args:
        model: any NNX model, with layers nested in attributes, lists, dicts or tuples.
        adapters: one or more. `targets` overrides their own targets.
        targets: for all adapters: "all-linear" (every linear layer but the output head), names ("q_proj",
            "attn.query"), globs ("decoder.*.mlp.*") or regular expressions of whole paths.
        allow_partial: accept a name that is present in some layers only; "all-linear" may be.
        heads: names of the output heads, which "all-linear" leaves out (None: the last layer as wide as the vocabulary;
            in a model without embeddings, a layer that is called head, lm_head, logits or classifier).
        exclude: names, globs or regular expressions of layers that no target reaches: "all-linear" but these.

    Returns:
        The model. `lora_report(model)` shows which layers were adapted, and why others were not.

    Raises:
        ConfigError: all targets that match nothing (with the available names) or some layers only, all named layers
            that cannot carry LoRA, and weights that an adapted layer shares with another one.

    Warns:
        UserWarning: a pattern or "all-linear" matches layers that cannot carry LoRA; lists them.

    >>> import jax.numpy as jnp
    >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    >>> model = apply_lora(model, [AdapterSpec(name="law", rank=2, alpha=4)], targets="all-linear")
    >>> graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    >>> def loss(lora, x):
    ...     return (nnx.merge(graph, lora, frozen)(x) ** 2).sum()
    >>> grads = nnx.grad(loss)(lora, jnp.ones((3, 8)))
    >>> grads["layers"][0]["lora_b"].shape
    (1, 2, 16)
    """
    check_model(model)
    refuse_only_in_runs(adapters)
    names = [spec.name for spec in adapters]
    if not adapters or len(set(names)) < len(names):
        raise ConfigError("lora.adapters", f"adapters need one or more different names, got {names}.")
    patterns = None if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
    targeted, left_out = find_targets(
        model,
        {spec.name: patterns or spec.targets for spec in adapters},
        allow_partial=allow_partial,
        heads=(heads,) if isinstance(heads, str) else heads,
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
    )
    linears = [candidate.linear for candidate, _ in targeted.values() if isinstance(candidate.linear, Linear)]
    largest = max(linear.in_features for linear in linears), max(linear.out_features for linear in linears)
    shared, calls = {}, Calls(map(dotted, targeted))
    for path, (candidate, members) in targeted.items():
        assert isinstance(candidate.linear, Linear)
        indices = [names.index(name) for name in members]
        adapt(candidate.module, candidate.linear, adapters, path, indices, largest, shared, calls)
    if left_out:
        warnings.warn(describe_left_out([candidate.refused for candidate in left_out]), UserWarning, stacklevel=2)
    return model
