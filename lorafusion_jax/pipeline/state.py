"""Gathers the trainable state of a pipeline to host arrays of the whole model, and scatters it onto any layout.

This is the content of a checkpoint. Each adapter has separate arrays at its own rank and targets, independent of the
other adapters.
L layers · A adapters · R replicas · r an adapter's rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from lorafusion_jax.pipeline import leaves as lv
from lorafusion_jax.pipeline.move import replicate, to_host, to_stage
from lorafusion_jax.pipeline.stage import Stage

type Read = Callable[[Any], np.ndarray]
type Own = dict[str, dict[str, np.ndarray]]  # adapter -> leaf -> array


def gather(stages: Sequence[Stage], *, read: Read = to_host) -> dict[str, Any]:
    """Collects weights, sums and optimizers of all stages. Collective over processes.

    Args:
        read: returns an array of a stage on the host. Called for one array after another.

    Returns:
        By adapter: lora [L, K, r] and sums [R, L, K, r] by leaf, and optimizers; loss [R, A], alive [A]; metrics [R, A]
        by name, if an objective has any.
    """
    last = stages[-1]
    assert last.totals is not None
    loss, metrics = _split_loss(last.totals)
    arrays = {
        "lora": _own_arrays(stages, [stage.lora for stage in stages], lv.WEIGHTS, read),
        "sums": _own_arrays(stages, [stage.sums for stage in stages], lv.SUMS, read),
        "loss": read(loss),
        "alive": read(stages[0].alive),
        "optimizers": _concatenate([stage.optimizers for stage in stages], read),
    }
    return arrays | ({"metrics": jax.tree.map(read, metrics)} if metrics else {})


def scatter(stages: Sequence[Stage], arrays: dict[str, Any]) -> None:
    """Gives the stages the result of `gather`, on this or another layout.

    With another number of replicas, partial sums are added up on the first replica.
    """
    replicas = stages[0].mesh.replicas
    totals = {"loss": arrays["loss"], **arrays.get("metrics", {})}
    totals = {name: _spread_rows(leaf, replicas) for name, leaf in totals.items()}
    for stage in stages:
        mesh = stage.mesh
        mine = np.asarray(mesh.local_replicas)
        sums = [
            {name: _spread_rows(leaf, replicas)[mine][:, stage.layers_of(name)] for name, leaf in own.items()}
            for own in (arrays["sums"][name] for name in stage.names)
        ]
        stage.take_weights(arrays["lora"])
        stage.sums = to_stage(lv.stack_adapters(stage.parts.columns, sums, lead=lv.SUMS), mesh)
        stage.optimizers = replicate(of_stage(stage, arrays["optimizers"]), mesh)
        stage.alive = replicate(np.asarray(arrays["alive"]), mesh)
        if stage.totals is not None:
            stage.totals = to_stage({name: leaf[mine] for name, leaf in totals.items()}, mesh)


def abstract_state(stages: Sequence[Stage], replicas: int) -> dict[str, Any]:
    """Returns shapes and dtypes of the result of `gather` with this number of replicas."""

    def concatenated(trees: list[Any]) -> Any:
        def join(*leaves: Any) -> Any:
            layers = sum(leaf.shape[0] for leaf in leaves) if leaves[0].ndim else None
            return jax.ShapeDtypeStruct(
                leaves[0].shape if layers is None else (layers, *leaves[0].shape[1:]), leaves[0].dtype
            )

        return jax.tree.map(join, *trees)

    last, parts = stages[-1], stages[-1].parts
    assert last.totals is not None
    loss, metrics = _split_loss(last.totals)
    row = jax.ShapeDtypeStruct((replicas, loss.shape[1]), jnp.float32)
    own = parts.own_shapes()
    arrays = {
        "lora": _structs(own),
        "sums": _structs(own, replicas),
        "loss": row,
        "alive": jax.ShapeDtypeStruct(last.alive.shape, last.alive.dtype),
        "optimizers": concatenated([stage.optimizers for stage in stages]),
    }
    return arrays | ({"metrics": dict.fromkeys(metrics, row)} if metrics else {})


def adapter_arrays(parts: Sequence[Any]) -> Any:
    """Joins an adapter's parts on the host: weights of `Stage.adapter`, or optimizer states.

    "layers.self_attn.q_proj.lora_a" → [L, K, r], and so on.
    """
    return _concatenate(list(parts))


def _own_arrays(stages: Sequence[Stage], trees: Sequence[lv.Leaves], lead: int, read: Read) -> Own:
    columns, hosts = stages[0].parts.columns, [jax.tree.map(read, tree) for tree in trees]

    def own(index: int) -> dict[str, np.ndarray]:
        parts = [lv.take_adapter(columns, host, index, lead=lead) for host in hosts]
        return {name: np.concatenate([part[name] for part in parts], lead - 1) for name in parts[0]}

    return {name: own(index) for index, name in enumerate(stages[0].names)}


def _structs(shapes: Mapping[str, Mapping[str, tuple[int, ...]]], *front: int) -> dict[str, Any]:
    return {
        name: {leaf: jax.ShapeDtypeStruct((*front, *shape), jnp.float32) for leaf, shape in own.items()}
        for name, own in shapes.items()
    }


def _split_loss(totals: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss, which every checkpoint has, and the metrics of objectives."""
    return totals["loss"], {name: total for name, total in totals.items() if name != "loss"}


def of_stage(stage: Stage, tree: Any) -> Any:
    """Slices a stage's layers out of every array. The array's path names its leaf; scalars are step counts."""

    def own(path: tuple, leaf: Any) -> np.ndarray:
        if not np.ndim(leaf):
            return np.asarray(leaf)
        name = next(key.key for key in path if isinstance(key, DictKey) and key.key.startswith("layers."))
        return np.asarray(leaf)[stage.layers_of(name)]

    return jax.tree_util.tree_map_with_path(own, tree)


def _concatenate(trees: list[Any], read: Read = to_host) -> Any:
    def join(*leaves: Any) -> np.ndarray:
        held = [read(leaf) for leaf in leaves]
        return np.concatenate(held) if held[0].ndim and len(held) > 1 else held[0]

    return jax.tree.map(join, *trees)


def _spread_rows(rows: Any, replicas: int) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.shape[0] == replicas:
        return rows
    spread = np.zeros((replicas, *rows.shape[1:]), rows.dtype)
    spread[0] = rows.sum(0)
    return spread
