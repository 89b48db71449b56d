"""Which tensors a PEFT folder must have, and in which shapes, by its own description: the base is not known here.

Models leave tensors out in some of their layers. A folder that could be one of theirs is right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from lorafusion_jax.adapters.init import SHARED
from lorafusion_jax.adapters.kind import Axis, Leaf
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.layout.layer import BESIDE, EXPERTS, FEED_FORWARD, MIXER, MIXERS, PARALLEL, PATHS
from lorafusion_jax.peft.leaves import HEAD, TOKENS
from lorafusion_jax.peft.read_config import Described
from lorafusion_jax.peft.settings import PREFIX, ROOT

KEYS = ("k_proj", "v_proj")
OVER_HEADS = {"q_proj": "N", "k_proj": "N", "v_proj": "N", "o_proj": "K"}  # the axis over heads
OVER_MLP = {"gate_proj": "N", "up_proj": "N", "down_proj": "K"}  # in some models twice as wide in some layers
AXES = ("K", "N", "R", "E", "D", "V", "M")  # the others are numbers


def tensor_problems(tensors: dict[str, np.ndarray], paths: Sequence[str], described: Described) -> list[str]:
    """Lists missing, extra and misshapen tensors."""
    table = adapter_kind(described.spec.kind)
    places = {path: table.leaves_at(path) for path in _required_paths(paths, described)}
    places |= {SHARED: table.shared} if table.shared else {}
    places |= {HEAD: described.spec.head.leaves} if described.spec.head else {}
    places |= {TOKENS: described.spec.tokens.leaves} if described.spec.tokens else {}
    tokens = described.spec.tokens
    rows = {} if tokens is None else {str(table): ids for table, ids in tokens.stored.items()}
    leaf_of_key = {key_of(path, leaf): (path, leaf) for path, leaves in places.items() for leaf in leaves}
    problems = [f"missing: {key}" for key in sorted(leaf_of_key.keys() - tensors.keys())]
    problems += [f"extra: {key}" for key in sorted(tensors.keys() - leaf_of_key.keys())]
    widths: dict[tuple[str, Axis], int] = {}
    for key in sorted(leaf_of_key.keys() & tensors.keys()):
        (path, leaf), shape = leaf_of_key[key], tensors[key].shape
        experts = leaf.axes[:1] if leaf.axes[:1] == ("E",) else ()
        axes = (*experts, *leaf.axes[len(experts) :][::-1])  # PEFT has them transposed
        projection = path.split(".", 2)[-1]
        size_by_axis = {"R": described.ranks.get(path, described.spec.rank)} | {
            axis: axis for axis in axes if axis not in AXES
        }
        size_by_axis |= {"M": len(rows[leaf.name])} if path == TOKENS else {}
        sizes = shape if len(shape) == len(axes) else (0,) * len(axes)
        expected = tuple(
            size_by_axis[axis] if axis in size_by_axis else _expected_width(projection, axis, size, widths)
            for axis, size in zip(axes, sizes, strict=True)
        )
        if shape != expected:
            problems.append(f"misshapen: {key} is {list(shape)}, expected {list(expected)}")
        elif not np.isfinite(tensors[key].astype(np.float32, copy=False)).all():
            problems.append(f"not finite: {key}")
    return problems


def _expected_width(projection: str, axis: Axis, size: int, widths: dict[tuple[str, Axis], int]) -> int:
    """The width of a projection that fits those of other layers, in `widths`: `size` if that may be."""
    name = projection.rpartition(".")[2]
    if axis == OVER_HEADS.get(name):  # what heads make wide may differ between layers
        return size
    first = widths.setdefault((projection, axis), size)
    return size if axis == OVER_MLP.get(name) and size in (2 * first, first / 2) else first


def _required_paths(paths: Sequence[str], described: Described) -> Iterable[str]:
    """Returns the required projections: of the named layers, or of all layers up to the last one present."""
    if described.layers is None and described.some_layers:
        return paths
    layers = _layers_of([path for path in paths if not _of_experts(path)])
    layers = layers if described.layers is None else described.layers
    with_experts = {int(path.split(".")[1]) for path in paths if _of_experts(path)}
    every = (
        _path_in(layer, name, paths)
        for name in described.spec.targets
        for layer in (sorted(with_experts) if with_experts and name in EXPERTS else layers)
    )
    modules = {path.rpartition(".")[0] for path in paths if not _of_experts(path)}
    mixed, present = _mixed(paths), {int(path.split(".")[1]) for path in paths}
    one_half = any(path.split(".")[2] == MIXER for path in paths)  # and what each has, only the model knows

    def layer_of(path: str) -> int:
        return int(path.split(".")[1])

    def may_lack(path: str) -> bool:
        module, _, name = path.rpartition(".")
        if name in KEYS and path not in paths:
            with_keys = [layer_of(other) for other in paths if other.endswith(f".{name}")]
            if with_keys and layer_of(path) > max(with_keys):
                return True  # the last layers may read keys and values of earlier ones
            if name == "v_proj" and module in modules:
                return True  # the values of a layer may be its keys
        if one_half:
            return path not in paths
        part = path.split(".")[2]  # layers may have another mixer, or experts in place of `feed_forward` or of an MLP
        in_some = (part in MIXERS and (mixed or layer_of(path) in present)) or part == FEED_FORWARD
        in_some |= described.as_parameters and part == "mlp"
        return path not in paths and module not in modules and in_some and not _of_experts(path)

    return [path for path in every if described.spec.has(path) and not may_lack(path)]


def _of_experts(path: str) -> bool:
    """Some layers may have an MLP in place of experts; which ones, the model says when an adapter is inserted."""
    return path.rpartition(".")[2] in EXPERTS


def _path_in(layer: int, name: str, paths: Collection[str]) -> str:
    """Where a projection is in a layer: beside experts, or in experts beside an MLP, if tensors speak of it."""
    beside = [f"layers.{layer}.{module}.{name}" for module in (*BESIDE, PARALLEL)]
    inside = next((path for path in beside if path in paths), None)
    ends = [path.split(".", 2)[2] for path in paths if path.endswith(f".{name}")]  # "name" alone: of the layer
    others = sorted({end for end in ends if end.removesuffix(f".{name}") not in (*BESIDE, PARALLEL)} or {PATHS[name]})
    candidates = [f"layers.{layer}.{end}" for end in others]
    return inside or next((path for path in candidates if path in paths), candidates[0])


def _mixed(paths: Iterable[str]) -> bool:
    return any(path.split(".")[2] in MIXERS[1:] for path in paths)


def _layers_of(paths: Sequence[str]) -> Sequence[int]:
    """Returns 0 to the last layer, or each n-th layer: some models have attention only there."""
    present = sorted({int(path.split(".")[1]) for path in paths})
    if present and present == [*range(present[0], present[-1] + 1, present[0] + 1)]:
        return present
    mixed = _mixed(paths)
    return range(present[-1] + 1 if mixed else max(1, len(present)))


def key_of(path: str, leaf: Leaf) -> str:
    """The name of a tensor in a PEFT folder."""
    roots = {SHARED: ROOT, HEAD: f"{ROOT}model.", TOKENS: f"{ROOT}model."}
    return f"{roots.get(path, f'{PREFIX}{path}.')}{leaf.peft_name}"
