"""Compiles functions for the devices of a stage.

Every array of a microbatch has a leading replica axis. Inside a program each device sees its own row. Arrays that the
devices of a replica do not share have a leading axis of devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from lorafusion_jax.session.lowered import kept
from lorafusion_jax.session.mesh import AXES, REPLICAS, StageMesh

ROWS, DEVICES, REPLICATED = P(REPLICAS), P(AXES), P()
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"
TOGETHER = "xla_gpu_all_reduce_combine_threshold_bytes"
# Numbers are rounded where the code says so. XLA may leave roundings to bfloat16 out within a fusion, and training and
# generation are fused differently: log p of samples would differ from that of a `forward` call on them.
ROUNDS = {"xla_allow_excess_precision": False}


def jit_on_stage(
    stage: StageMesh, function: Callable, in_specs: tuple, out_specs: Any, *,
    donate: tuple[int, ...] = (), options: dict[str, bool | int] | None = None, identity: str | None = None,
) -> Any:  # fmt: skip
    """Compiles a function of a stage.

    Args:
        in_specs: sharding of each operand, or a function of it.
        identity: of programs that are worth keeping, see `kept`.
    """
    if stage.mesh.size == 1:
        function = function if identity is None else kept(function, identity)
        return jax.jit(function, donate_argnums=donate, compiler_options=ROUNDS | (options or {}))

    @wraps(function)  # profiles show its name
    def mapped(*operands: Any) -> Any:
        specs = tuple(
            spec(operand) if callable(spec) else spec for spec, operand in zip(in_specs, operands, strict=True)
        )
        # check_vma is off: sums and losses differ by replica, as their specs declare.
        local = jax.shard_map(function, mesh=stage.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return local(*operands)

    options = ROUNDS | (options or {}) | hidden_gathers(stage.fsdp)
    return jax.jit(mapped, donate_argnums=donate, compiler_options=options)


def hidden_gathers(fsdp: int) -> dict[str, bool]:
    """Returns the XLA option that overlaps gathering weights with compute, with fsdp. XLA_FLAGS takes precedence."""
    return {OVERLAP: True} if fsdp > 1 and OVERLAP not in os.environ.get("XLA_FLAGS", "") else {}


def hidden_sums(parts: int) -> dict[str, bool | int]:
    """Returns the XLA options that overlap the sums of one part of the rows with the products of others.

    All-reduces of two parts are not made one. XLA_FLAGS takes precedence.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in {OVERLAP: True, TOGETHER: 0}.items() if parts > 1 and name not in flags}


def split_axis(spec: P) -> int | None:
    """Returns the axis of a frozen tensor that is split over fsdp."""
    return next((number for number, name in enumerate(spec) if name == "fsdp"), None)


def gather(leaf: Array, axis: int | None) -> Array:
    """Returns the whole tensor, of which each device has a part along `axis`; None if each has all of it."""
    return leaf if axis is None else lax.all_gather(leaf, "fsdp", axis=axis, tiled=True)


def row_of_device(rows: Any) -> Any:
    """Removes the replica axis, which has one row on a device."""
    return jax.tree.map(lambda leaf: leaf[0], rows)
