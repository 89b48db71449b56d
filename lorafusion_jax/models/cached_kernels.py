"""Quantised kernels between the devices and an entry of their cache."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.models.naming import Tensor
from lorafusion_jax.models.quantised_kernels import ShardingRule
from lorafusion_jax.weights.entry import Entry, array_name
from lorafusion_jax.weights.table import StoredKernel, StoredKind


def read_cached(tensor: Tensor, entry: Entry, kind: StoredKind, rule: ShardingRule) -> dict[str, jax.Array]:
    """Reads the stored arrays of a kernel. Each device reads its own part.

    Raises:
        CheckpointError: `model.broken-cache`.
    """
    out_features, in_features = tensor.shape
    name, arrays = tensor.leaf_name, {}
    for array, spec in kind.arrays(in_features, out_features).items():

        def part(index: tuple[slice, ...] | None, array: str = array) -> np.ndarray:
            try:
                return entry.read(array_name(name, array), index or ())
            except OSError as problem:
                raise _unreadable(entry, problem) from problem

        arrays[array] = jax.make_array_from_callback(spec.shape, rule(name, spec.shape), part)
    return arrays


def host_copy(x: jax.Array) -> np.ndarray:
    """Copies an array from the devices of this process, which hold all of it, and keeps nothing on the host."""
    array, parts = np.empty(x.shape, x.dtype), set()
    for shard in x.addressable_shards:
        if (part := str(shard.index)) not in parts:  # replicas hold the same bytes
            parts.add(part)
            # An array remembers its copy on the host, so a temporary one on the same buffer is copied.
            copy = jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
            array[shard.index] = np.asarray(copy)
    return array


def program_digest(kernels: Iterable[StoredKernel]) -> str:
    """Returns a digest of everything that turns kernels into bytes: the programs of `quantise`, jax and the device.

    Another version of a kind, or of the package that adds it, has another program if its bytes could differ.
    """
    total = hashlib.sha256(f"{version('jax')} {version('jaxlib')} {jax.devices()[0].device_kind}".encode())
    texts = []
    for stored in set(kernels):
        kernel = jax.ShapeDtypeStruct(stored.shape, jnp.float32)
        texts.append(
            jax.jit(lambda kernel_KN, kind=stored.kind: dict(kind.quantise(kernel_KN))).lower(kernel).as_text()
        )
    total.update("".join(sorted(texts)).encode())
    return total.hexdigest()


def _unreadable(entry: Entry, problem: OSError) -> CheckpointError:
    return CheckpointError(
        "model.broken-cache",
        "the cached weights of the base cannot be read.",
        where=str(entry.folder),
        why=str(problem),
        fix=f"rm -r {shlex.quote(str(entry.folder))}; the base is then quantised again",
    )
