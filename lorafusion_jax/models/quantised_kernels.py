"""Kernels of checkpoints that come quantised: their tensors, how they get onto the devices as they
are, and into the entry of a cache.

Dims: `K` in · `N` out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lorafusion_jax.errors import CheckpointError, quoted
from lorafusion_jax.models.checkpoint import READABLE, Stored, plain_index, read_slice
from lorafusion_jax.models.naming import Tensor
from lorafusion_jax.weights.checkpoint_formats import CheckpointFormat, TensorSpec, small_arrays
from lorafusion_jax.weights.entry import Entry, array_name
from lorafusion_jax.weights.table import StoredKernel, StoredKind, stored_kind

ShardingRule = Callable[[str, tuple[int, ...]], Sharding]


def tensors_of(tensor: Tensor, form: CheckpointFormat | None) -> dict[str, TensorSpec]:
    """The tensors of the checkpoint that a leaf is made of, by name.

    Args:
        form: of the layers' kernels; None: they are not quantised.
    """
    if tensor.parts:
        return {name: spec for part in tensor.parts for name, spec in part.tensors.items()}
    if form is None or not tensor.transposed:
        return {tensor.name: TensorSpec(dtypes=READABLE, shapes=(tensor.shape,))}
    out_features, in_features = tensor.shape
    bulk = TensorSpec(dtypes=(form.bulk_dtype,), shapes=(form.bulk_shape(in_features, out_features),))
    stem = stem_of(tensor)
    others = form.tensors(in_features, out_features).items()
    return {tensor.name: bulk} | {f"{stem}{ending}": spec for ending, spec in others}


def stem_of(tensor: Tensor) -> str:
    """What the names of a kernel's tensors begin with."""
    return tensor.name.removesuffix(".weight")


def read_kernel(
    tensor: Tensor, form: CheckpointFormat, stored: Mapping[str, Stored], rule: ShardingRule
) -> dict[str, jax.Array]:
    """Reads the stored arrays of a kernel. Each device reads its part of the largest one only.

    Raises:
        CheckpointError: `model.quantised-otherwise`.
    """
    out_features, in_features = tensor.shape
    stem, kind = stem_of(tensor), stored_kind(form.kind)
    assert kind is not None, form.kind
    shapes = {name: array.shape for name, array in kind.arrays(in_features, out_features).items()}
    parameters = {
        ending: read_slice(entry, f"{stem}{ending}", plain_index(None, entry.shape))
        for ending, spec in form.tensors(in_features, out_features).items()
        if spec.read and (entry := stored.get(f"{stem}{ending}")) is not None
    }
    bulk = stored[tensor.name]
    small = small_arrays(form, parameters, in_features, out_features, stem=stem, where=str(bulk.file))
    arrays = {
        name: jax.make_array_from_callback(shapes[name], rule(tensor.leaf_name, shapes[name]), array.__getitem__)
        for name, array in small.items()
    }
    target = rule(tensor.leaf_name, shapes[form.bulk])
    return arrays | {form.bulk: _read_bulk(tensor.name, bulk, shapes[form.bulk], target, transposed=form.transposed)}


def _read_bulk(name: str, stored: Stored, shape: tuple[int, ...], target: Sharding, *, transposed: bool) -> jax.Array:
    shape = shape[::-1] if transposed else shape
    view = replace(stored, shape=shape)  # the bytes of packed codes lie in the same order
    stored_sharding = transposed_sharding(target) if transposed else target

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.ascontiguousarray(read_slice(view, name, plain_index(index, shape)))

    bulk = jax.make_array_from_callback(shape, stored_sharding, part)
    return _transpose(target)(bulk) if transposed else bulk


@lru_cache(maxsize=256)
def _transpose(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x.T, out_shardings=target)


def on_host(sharding: Sharding) -> bool:
    """Whether arrays of this sharding are in the host's memory.

    numpy makes such an array in less time than XLA compiles a program for its shape.
    """
    return all(device.platform == "cpu" for device in sharding.device_set)


def transposed_sharding(sharding: Sharding) -> Sharding:
    """The sharding of an [N, K] matrix whose transpose has the given sharding."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, None, None)[:2]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec[::-1]))


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
        fix=f"rm -r {quoted(entry.folder)}; the base is then quantised again",
    )
