"""Checks an adapter kind before anything is loaded or written: its table, and its functions traced on shapes."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.adapters.kind import AdapterKind, Leaf, Sizes
from lorafusion_jax.adapters.table import GROUP, KINDS, adapter_kind
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.plugins import origin

type Size = tuple[int, int, int]  # K, N, R
SMALL: Size = (12, 10, 4)  # all different
NOT_OF_THE_KIND = ("lorafusion_jax", "jax", "jaxlib", "numpy", "contextlib")  # packages in a traceback
AXES = ("K", "N", "R")


def check_kind(name: str, sizes: Iterable[Size] = ()) -> None:
    """Checks the leaves of a kind, and runs its functions on small tensors and traces them on shapes.

    Args:
        sizes: (K, N, R) of the projections of a job.

    Raises:
        ConfigError: `kind.broken`, with the package that the kind comes from; `kind.no-peft`, its adapters cannot be
            exported.
    """
    kind = adapter_kind(name)
    try:
        wrong = next(_wrong_leaves(kind), None) or _wrong_functions(kind)
        wrong = wrong or next(filter(None, (_wrong_shapes(kind, size, jnp) for size in sizes)), "")
    except Exception as problem:  # code of another package may raise anything
        frames = traceback.extract_tb(problem.__traceback__)
        kind_frames = [frame for frame in frames if not any(f"/{name}/" in frame.filename for name in NOT_OF_THE_KIND)]
        at = f" ({kind_frames[-1].filename}:{kind_frames[-1].lineno})" if kind_frames else ""
        wrong = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}{at}"
    if wrong:
        raise ConfigError(
            "kind.broken",
            f"the adapter kind '{name}' cannot be used.",
            where=origin(GROUP, name),
            why=wrong,
            fix="another kind, or leaves and functions as docs/pages/extending.md describes them",
        )
    if not kind.exportable:
        raise ConfigError(
            "kind.no-peft",
            f"adapters of kind '{name}' cannot be exported.",
            where=origin(GROUP, name),
            why="PEFT has no such kind, and it shifts outputs, which neither LoRA nor a merged weight could hold",
            fix="lora.kind: lora; or the kind's package says what adapter_config.json calls it: AdapterKind(peft=…)",
        )


def _wrong_leaves(kind: AdapterKind) -> Iterator[str]:
    names = [leaf.name for leaf in kind.leaves]
    if len(set(names)) < len(names):
        yield f"two leaves have one name: {', '.join(names)}"
    if not any(leaf.trainable for leaf in kind.leaves):
        yield "it has no trainable leaf"
    if not kind.of_projections:
        yield "all its leaves are shared, so projections have none"
    if kind.prepared and (kind.prepare is None or kind.column_scale is None):
        yield "it has prepared tensors, but no prepare or no column_scale"
    if any(leaf.trainable or leaf.shared or "R" in leaf.axes for leaf in kind.prepared):
        yield "a prepared tensor is trainable, shared, or has an axis R"
    if unknown := set(kind.scaled) - set(names):
        yield f"scaled names {', '.join(sorted(unknown))}, and its leaves are {', '.join(names)}"
    leaf_of = {leaf.name: leaf for other in KINDS.values() for leaf in other.leaves}
    for leaf in kind.leaves:
        if not leaf.name.isidentifier():
            yield f"'{leaf.name}' is not a name: letters, digits and underscores"
        twice = any(leaf.axes.count(axis) > 1 for axis in "KN")
        if twice or any(axis not in AXES and not isinstance(axis, int) for axis in leaf.axes):
            yield f"{leaf.name} has the axes {leaf.axes}: K and N at most once, R and numbers"
        if leaf.shared and leaf.trainable:
            yield f"{leaf.name} is shared and trainable: shared tensors are constant, trainable=False"
        if leaf.name in leaf_of and (leaf_of[leaf.name].axes, leaf_of[leaf.name].trainable) != (
            leaf.axes,
            leaf.trainable,
        ):
            yield f"{leaf.name} is the name of another tensor in a built-in kind"
        if kind.peft is not None and not leaf.peft_name:
            yield f"PEFT knows the kind, and {leaf.name} has no peft_name"


def _wrong_functions(kind: AdapterKind) -> str:
    tensors = {leaf.name: _drawn(leaf) for leaf in kind.leaves}
    for leaf in kind.leaves:
        if tensors[leaf.name].shape != leaf.shape(*SMALL):
            return f"init of {leaf.name} returns the shape {tensors[leaf.name].shape}, not {leaf.shape(*SMALL)}"
    started = [] if kind.start is None else list(kind.start(_kernel(SMALL, np), tensors, _sizes(SMALL, np)))
    if unknown := set(started) - tensors.keys():
        return f"start returns {', '.join(sorted(unknown))}, and the kind has {', '.join(tensors)}"
    if wrong := _wrong_shapes(kind, SMALL, np, tensors) or _wrong_shapes(kind, SMALL, jnp):
        return wrong
    if not _pads_with_zeros(kind, tensors):
        return "what is zero beyond an adapter's rank does not give zeros in A and B"
    w_KN = np.random.default_rng(1).random(SMALL[:2], np.float32)
    changed = {name: tensor + np.float32(1) for name, tensor in tensors.items()}  # B starts at zero
    merged, by_formula = (merge(w_KN, changed, _sizes(SMALL, np)) for merge in (kind.merge, kind.merge_by_formula))
    same = np.shape(merged) == w_KN.shape and np.allclose(merged, by_formula, rtol=1e-4, atol=1e-4)
    return "" if same else "fold merges other weights than column_scale and low_rank compute"


def _wrong_shapes(kind: AdapterKind, size: Size, library: Any, tensors: dict[str, Any] | None = None) -> str:
    """Compares the shapes of what the functions return: traced with their gradient, or computed from tensors."""

    def run(tensors: dict[str, Any]) -> dict[str, Any]:
        a, b = kind.low_rank(tensors, _sizes(size, library))
        arrays = {"A of low_rank": a, "B of low_rank": b}
        if kind.column_scale is not None:
            arrays["column_scale"] = kind.factors(_kernel(size, library), tensors, _sizes(size, library))
        if kind.prepare is not None:
            arrays |= kind.prepare(_kernel(size, library), tensors, _sizes(size, library))
        if kind.shift is not None:
            arrays["shift"] = kind.shift(tensors, _sizes(size, library))
        if kind.start is not None:
            started = kind.start(_kernel(size, library), tensors, _sizes(size, library))
            arrays |= {f"{name} of start": array for name, array in started.items()}
        return arrays

    num_in, num_out, rank = size
    columns = kind.columns * rank
    shape_of = {"A of low_rank": (num_in, columns), "B of low_rank": (columns, num_out)}
    shape_of |= dict.fromkeys(("column_scale", "shift"), (num_out,))
    shape_of |= {leaf.name: leaf.shape(*size) for leaf in kind.prepared}
    shape_of |= {f"{leaf.name} of start": leaf.shape(*size) for leaf in kind.leaves}
    if tensors is None:
        shapes = {leaf.name: jax.ShapeDtypeStruct(leaf.shape(*size), jnp.float32) for leaf in kind.leaves}
        results = jax.eval_shape(run, shapes)
        jax.eval_shape(jax.grad(lambda tensors: sum(jnp.sum(array) for array in run(tensors).values())), shapes)
    else:
        results = run(tensors)
    for name, array in results.items():
        if tuple(array.shape) != shape_of[name]:
            by = "numpy" if library is np else "jax"
            return f"{name} has the shape {tuple(array.shape)} with {by}, not {shape_of[name]} (K, N, R: {size})"
    return ""


def _drawn(leaf: Leaf) -> np.ndarray:
    draw = np.random.default_rng(0).random
    return np.asarray(leaf.init(lambda count: draw(count, np.float32), leaf.shape(*SMALL)), np.float32)


def _sizes(size: Size, library: Any) -> Sizes:
    return Sizes(K=size[0], N=size[1], R=size[2], scale=np.float32(2), np=library)


def _kernel(size: Size, library: Any) -> Any:
    return library.ones(size[:2], np.float32)


def _pads_with_zeros(kind: AdapterKind, tensors: dict[str, np.ndarray]) -> bool:
    """Whether zeros beyond half the rank give zero columns of A and zero rows of B, from there on."""
    half = SMALL[2] // 2
    padded = {}
    for leaf in kind.leaves:
        array = tensors[leaf.name] + np.float32(1)  # B starts at zero
        for axis in (number for number, letter in enumerate(leaf.axes) if letter == "R"):
            np.moveaxis(array, axis, 0)[half:] = 0
        padded[leaf.name] = array
    a, b = kind.low_rank(padded, _sizes(SMALL, np))
    beyond = half * kind.columns
    return not np.any(a[:, beyond:]) and not np.any(b[beyond:])
