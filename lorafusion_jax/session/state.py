"""Gathers the trainable state of a pipeline to host arrays of the whole model, and scatters it onto any layout.

By adapter it is the content of a checkpoint. Each adapter has separate arrays at its own rank and targets, independent
of the other adapters.
L layers · A adapters · R devices of a stage · r an adapter's rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.device_copy import InParts, read_together
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.move import replicate, to_devices, to_host, to_stage
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.stage import Stage

type Read = Callable[[Any], np.ndarray]
type Own = dict[str, dict[str, np.ndarray]]  # adapter -> leaf -> array


def gather(stages: Sequence[AnyStage], links: Links, *, read: Read = to_host) -> dict[str, Any]:
    """Collects leaves, sums and optimizers of all stages on every process. Collective over processes.

    Args:
        read: returns an array of a stage on the host, but for constants. Called for one array after another.

    Returns:
        By adapter: lora [L, K, r] by leaf, constant ones included; sums [R, L, K, r] by leaf; arrays of optimizers by
        their path. alive [A]; totals [R, A] of loss and metrics by name. Of the devices of a replica the first one has
        the replica's totals, and the others zeros.
    """
    columns = stages[0].parts.leaves.columns
    parts = links.share({index: _on_host(stage, read) for index, stage in local_stages(stages).items()})
    optimizers = [part.get("optimizers", {}) for part in parts]
    tensor = stages[0].mesh.tensor
    return {
        "lora": _own_arrays(stages[0].occupied, columns, [part.get("leaves", {}) for part in parts], lv.WEIGHTS),
        "sums": _own_arrays(stages[0].occupied, columns, [part.get("sums", {}) for part in parts], lv.SUMS),
        "totals": {name: _by_device(rows, tensor) for name, rows in parts[-1]["totals"].items()},
        "alive": parts[0]["alive"],
        "optimizers": {
            name: _join([by_name.get(name, {}) for by_name in optimizers], lv.leaf_of) for name in stages[0].names
        },
    }


def _on_host(stage: Stage, read: Read) -> dict[str, Any]:
    first = {} if stage.extent.start else {"alive": read(stage.alive)}  # equal on all stages
    return first | {
        "leaves": jax.tree.map(read, stage.lora) | jax.tree.map(to_host, stage.constants),
        "sums": jax.tree.map(read, stage.sums),
        "optimizers": {
            spec.name: stage.joined(place).split_state(lv.by_path(jax.tree.map(read, stage.optimizers[spec.name])))
            for place, spec in stage.occupied
            if spec.name in stage.optimizers
        },
        "totals": jax.tree.map(read, stage.totals or {}),
    }


def states_of(
    arrays: Mapping[str, Any],
    index: Mapping[str, int],
    progress: Mapping[str, tuple[int, str]] = MappingProxyType({}),
) -> dict[str, AdapterState]:
    """Returns the result of `gather` by adapter. Sums that are all zero are left out.

    Args:
        index: position of each adapter.
        progress: steps of each adapter, and the digest of its data.
    """

    def state_of(name: str, place: int) -> AdapterState:
        sums = arrays["sums"].get(name, {})
        totals = {key: np.asarray(rows)[:, place] for key, rows in arrays["totals"].items()}
        # By their bits: sums of -0.0 are of a batch that has begun.
        begun = any(np.asarray(leaf).view(np.uint32).any() for leaf in (*sums.values(), *totals.values()))
        step, data = progress.get(name, (0, ""))
        return AdapterState(
            step=step,
            data=data,
            weights=arrays["lora"][name],
            optimizer=arrays["optimizers"].get(name, {}),
            sums=sums if begun else {},
            totals=totals if begun else {},
            alive=bool(np.asarray(arrays["alive"])[place]),
        )

    return {name: state_of(name, index[name]) for name in arrays["lora"]}


def load_states(stages: Sequence[AnyStage], states: Mapping[str, AdapterState]) -> None:
    """Gives the stages of this process the states of their adapters, on this or another layout.

    With another number of devices, partial sums are added up on the first device.

    Raises:
        ValueError: they are not those of these adapters.
    """
    _check_shapes(stages, states)
    tensor, devices, num_places = stages[0].mesh.tensor, stages[0].mesh.mesh.size, len(stages[0].parts.specs)
    zeros, alive = np.zeros((devices, num_places), np.float32), np.ones(num_places, bool)
    totals = {key: zeros.copy() for state in states.values() for key in state.totals}
    for place, spec in stages[0].occupied:
        alive[place] = states[spec.name].alive
        for key, total in states[spec.name].totals.items():
            totals[key][:, place] = lv.spread_rows(total, devices)
    for stage in local_stages(stages).values():
        mesh, columns = stage.mesh, stage.programs.columns.trained
        replicas_here, devices_here = np.asarray(mesh.local_replicas), np.asarray(mesh.local_devices)
        sums = [
            {
                name: lv.spread_rows(leaf, devices)[devices_here][:, stage.layers_of(name)]
                for name, leaf in (states[adapter].sums if adapter in states else {}).items()
                if name in columns
            }
            for adapter in stage.all_names
        ]
        shapes = {name: (len(devices_here), *shape) for name, shape in stage.leaf_shapes.items()}
        stage.take_weights({name: state.weights for name, state in states.items()})
        stage.sums = to_devices(lv.stack_adapters(columns, sums, shapes, lead=lv.SUMS), mesh)
        optimizers = {
            spec.name: stage.part_of_state(
                stage.joined(place), stage.optimizers[spec.name], states[spec.name].optimizer
            )
            for place, spec in stage.occupied
        }
        stage.optimizers = replicate(optimizers, mesh)
        stage.alive = replicate(alive, mesh)
        if stage.totals is not None:
            stage.totals = to_stage(
                {key: totals.get(key, zeros)[::tensor][replicas_here] for key in stage.totals}, mesh
            )


def _check_shapes(stages: Sequence[AnyStage], states: Mapping[str, AdapterState]) -> None:
    leaves = stages[0].parts.leaves
    shapes = leaves.own_shapes(stages[0].occupied)
    if missing := shapes.keys() ^ states.keys():
        raise ValueError(f"its adapters are not those of the job: {', '.join(sorted(missing))}")
    for name, state in states.items():
        stored = {leaf: array.shape for leaf, array in state.weights.items()}
        trained = {leaf: shape for leaf, shape in shapes[name].items() if leaves.columns[leaf].leaf.trainable}
        sums = {leaf: array.shape[1:] for leaf, array in state.sums.items()}
        for sizes, expected in ((stored, shapes[name]), (sums or trained, trained)):
            if wrong := [leaf for leaf in expected | sizes if sizes.get(leaf) != expected.get(leaf)]:
                raise ValueError(f"{name}: {wrong[0]} has another size, or is missing or too many")


def adapter_arrays(parts: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Joins an adapter's parts (`Stage.adapter`) on the host: "layers.self_attn.q_proj.lora_a" → [L, K, r]."""
    return _join([host_leaves(part) for part in parts], lambda name: name)


def read_adapter(
    executor: Executor, place: int, name: str, *, optimizer: bool, sums: bool, copies: bool
) -> Callable[[], dict[str, Any]]:
    """Returns a function that waits for the arrays of an `AdapterState`. Collective over processes.

    See `StageState.part_of_state` and `StageState.write_sums` for the inverse.

    Args:
        optimizer, sums: with the state of its optimizer, with the sums of a begun global batch.
        copies: the devices copy the state of the optimizer, because the adapter trains on.
    """
    links, tensor = executor.links, executor.stages[0].mesh.tensor

    def read_stage(stage: Stage) -> tuple[Any, Any, Any, Any]:
        begun = stage.adapter_sums(place) if sums else ({}, {})
        joined = stage.all_joined(place), stage.joined(place)
        if optimizer and copies:
            return *stage.copy_state(place), begun, joined
        weights, state = stage.adapter(place), stage.optimizers[name] if optimizer else {}
        if is_alone():
            weights, state = jax.tree.map(lambda leaf: InParts(leaf.shape, [leaf], 0), (weights, state))
        return weights, state, begun, joined

    futures = executor.read(read_stage)

    def wait() -> dict[str, Any]:
        stages = [future.result() for future in futures]
        futures.clear()
        parts = {
            index: {
                "weights": joined[0].split(_transferred(leaves)),
                "optimizer": joined[1].split_state(_transferred(lv.by_path(state))),
                "sums": _transferred(begun[0]),
                "totals": _transferred(begun[1]),
            }
            for index, (leaves, state, begun, joined) in zip(executor.local_stages, stages, strict=True)
        }
        shared = links.share(parts)
        weights, states, summed, totals = (
            [part.get(key, {}) for part in shared] for key in ("weights", "optimizer", "sums", "totals")
        )
        # Copies: a host array may be a view of a device array, which the next step overwrites.
        return {
            "weights": adapter_arrays(weights),
            "optimizer": {path: np.array(leaf) for path, leaf in _join(states, lv.leaf_of).items()},
            "sums": _join(summed, lambda name: name, partial(np.concatenate, axis=1)),
            "totals": {key: _by_device(rows, tensor) for key, rows in totals[-1].items()},
        }

    return wait


def _transferred(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns arrays of a stage on the host, those in parts together."""
    in_parts = {name: leaf for name, leaf in arrays.items() if isinstance(leaf, InParts)}
    whole_arrays = {name: leaf for name, leaf in arrays.items() if name not in in_parts}
    return host_leaves(whole_arrays) | dict(zip(in_parts, read_together([*in_parts.values()]), strict=True))


def host_leaves(part: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns arrays of a stage on the host."""
    return {name: leaf if isinstance(leaf, np.ndarray) else to_host(leaf) for name, leaf in part.items()}


def _own_arrays(
    adapters: Sequence[tuple[int, AdapterSpec]],
    columns: Mapping[str, lv.Columns],
    hosts: Sequence[Mapping[str, np.ndarray]],
    lead: int,
) -> Own:
    parts = [{name: at for name, at in columns.items() if name in host} for host in hosts]

    def of_adapter(index: int, spec: AdapterSpec) -> dict[str, np.ndarray]:
        arrays = [
            lv.take_adapter(part, host, index, lv.own_columns(part, index, spec), lead=lead)
            for part, host in zip(parts, hosts, strict=True)
        ]
        return _join(arrays, lambda name: name, partial(np.concatenate, axis=lead - 1))

    return {spec.name: of_adapter(index, spec) for index, spec in adapters}


def _join(
    parts: Sequence[Mapping[str, Any]],
    leaf_of: Callable[[str], str | None],
    concatenate: Callable[[list[Any]], Any] = np.concatenate,
) -> dict[str, Any]:
    """Joins the arrays of the stages by name, along their layers. What is not of layers is equal on all stages."""
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        arrays = [part[name] for part in parts if name in part]
        of_layers = (leaf_of(name) or "").startswith(lv.LAYERS)
        joined[name] = concatenate(arrays) if of_layers else concatenate(arrays[:1]) if arrays[0].ndim else arrays[0]
    return joined


def _by_device(rows: Any, tensor: int) -> np.ndarray:
    """Returns rows of replicas as rows of devices."""
    rows = np.asarray(rows)
    spread = np.zeros((tensor * len(rows), *rows.shape[1:]), rows.dtype)
    spread[::tensor] = rows
    return spread
