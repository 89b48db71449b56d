"""Hugging Face directory → frozen weights, several tensors at a time, straight to their places on the devices.

Placeholders stand for the weights until they are read, so that programs compile meanwhile.

Dims: `K` in · `N` out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.multimodal import names_in_file
from lorafusion_jax.families.table import family_named
from lorafusion_jax.families.unread import SAVE_PLAIN, is_ignored, other_root
from lorafusion_jax.models.checkpoint import Stored, as_published, list_tensors, plain_index, read_slice
from lorafusion_jax.models.decoder import Decoder
from lorafusion_jax.models.expert_files import Part, as_stored, read_parts
from lorafusion_jax.models.naming import Tensor, frozen_tensors
from lorafusion_jax.models.quantised_kernels import (
    ShardingRule,
    on_host,
    read_cached,
    read_kernel,
    tensors_of,
    transposed_sharding,
)
from lorafusion_jax.weights.checkpoint_formats import FLOATS, FORMATS, CheckpointFormat, TensorSpec, check_stored_as
from lorafusion_jax.weights.entry import Entry
from lorafusion_jax.weights.table import NONE, StoredKernel, StoredKind, check_kernels, stored_kind

STAND_IN = 0.01  # not zero: kinds of adapters may divide by the norm of a column


def stand_ins(tensors: Sequence[Tensor], kind: StoredKind | None, dtype: np.dtype, rule: ShardingRule) -> dict:
    """Makes arrays of the shapes, dtypes and shardings of the weights; equal ones are one and the same array.

    Args:
        kind: storage of the layers' kernels; None: they have `dtype`, as all others.
    """
    array_of: dict[tuple, jax.Array] = {}

    def filled(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        key = shape, jnp.dtype(dtype), rule(name, shape)
        if key not in array_of:
            array_of[key] = _fill(*key)()
        return array_of[key]

    def of(tensor: Tensor) -> Any:
        name, shape = tensor.leaf_name, tensor.leaf_shape
        if kind is None or not tensor.transposed:
            return filled(name, shape, jnp.float32 if tensor.float32 else dtype)
        arrays = kind.of(tensor.experts).arrays(*shape)
        return {part: filled(name, array.shape, array.dtype) for part, array in arrays.items()}

    return {tensor.leaf_name: of(tensor) for tensor in tensors}


@lru_cache(maxsize=64)
def _fill(shape: tuple[int, ...], dtype: np.dtype, target: Sharding) -> Callable[[], jax.Array]:
    value = STAND_IN if jnp.issubdtype(dtype, jnp.inexact) else 1
    if on_host(target):
        return lambda: jax.device_put(np.full(shape, value, dtype), target)
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=target)


# Whether the tensors of a checkpoint are those of its config.json.


PLAIN = "not quantised"


def check_tensors(
    specs: Mapping[str, TensorSpec], stored: Mapping[str, Stored], config: ModelConfig, directory: Path
) -> None:
    """Compares the headers of a checkpoint with what its config.json promises.

    Args:
        specs: by name, see `quantised_kernels.tensors_of`.

    Raises:
        CheckpointError: `model.tensors-differ`, with everything that is missing, extra or of another shape or type.
    """
    missing = sorted(name for name in specs.keys() - stored.keys() if not specs[name].optional)
    extra = sorted(name for name in stored.keys() - specs.keys() if not is_ignored(name, config))
    problems = [f"missing: {name}{_shapes(specs[name])}" for name in missing]
    problems += [f"not of this model: {name} {list(stored[name].shape)}" for name in extra]
    both = sorted(specs.keys() & stored.keys())
    problems += [problem for name in both if (problem := _shape_problem(name, specs[name], stored[name]))]
    head = family_named(config.family).tensor_name("lm_head.weight")
    if problems:
        root = other_root(missing, stored)
        raise CheckpointError(
            "model.tensors-differ",
            f"{len(problems)} tensors do not fit the model that config.json describes:\n    " + "\n    ".join(problems),
            where=str(directory),
            why="the tie_word_embeddings of config.json is false" if missing == [head] else root,
            fix=SAVE_PLAIN
            if root
            else "base.model: the model that it was made of, with base.quantize"
            if any(problem.startswith(PLAIN) for problem in problems)
            else "use the config.json and the weights of the same model",
        )


def _shape_problem(name: str, spec: TensorSpec, stored: Stored) -> str | None:
    if stored.dtype not in spec.dtypes:
        plain = stored.dtype in FLOATS and not set(FLOATS) & set(spec.dtypes)
        return f"{PLAIN if plain else 'unreadable type'}: {name} is {stored.dtype}"
    if spec.shapes and stored.shape not in spec.shapes:
        return f"wrong shape: {name} is {list(stored.shape)}, config.json says{_shapes(spec)}"
    return None


def _shapes(spec: TensorSpec) -> str:
    return " " + " or ".join(str(list(shape)) for shape in spec.shapes) if spec.shapes else ""


READERS = 4  # threads; so many tensors may lie on the host at a time
Weight = jax.Array | dict[str, jax.Array]  # plain, or the arrays of a stored kernel, see `weights.table`


def open_frozen(
    model_dir: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    quantize: str = NONE,
    sharding: Sharding | ShardingRule | None = None,
) -> FrozenReader:
    """Checks the headers of a model directory; no weights are read yet.

    Args:
        model_dir: config.json and safetensors, single or sharded with an index.
        dtype: dtype of the base weights; conversion runs on the device.
        sharding: sharding of every leaf, or a function (leaf name such as "layers.0.mlp.up_proj.kernel", shape) →
            sharding, which is asked for each array of a stored kernel, under the kernel's name and the array's own
            shape. Default: everything on the first device.
        quantize: a name of `weights.table`; from the checkpoint's values, not from those rounded to `dtype`. A
            checkpoint that comes quantised must be stored as it is.
    Raises:
        CheckpointError: the architecture is not implemented; files are missing or corrupt; tensors are missing, extra
            or of the wrong shape (all of them in one message).
        ConfigError: a kind that does not exist, whose package is broken, that cannot store these kernels, or that is
            not the checkpoint's.
    """
    config = ModelConfig.from_hf(model_dir)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    kind = stored_kind(quantize)
    check_stored_as(quantize, config.checkpoint_format, where=str(model_dir))
    form = None if config.checkpoint_format is None else FORMATS[config.checkpoint_format]
    stored, tensors = _text_tensors(as_published(list_tensors(model_dir), config), frozen_tensors(model), config)
    tensors = [replace(tensor, parts=_parts(tensor, stored, config)) for tensor in tensors]
    specs = {name: spec for tensor in tensors for name, spec in tensors_of(tensor, form).items()}
    check_tensors(specs, stored, config, Path(model_dir))
    for layer in config.kinds:
        check_kernels(quantize, layer.kernel_shapes())
    return FrozenReader(
        tensors=tensors, stored=stored, dtype=jnp.dtype(dtype), kind=kind, form=form, sharding_rule=_rule(sharding)
    )


@dataclass(frozen=True, kw_only=True)
class FrozenReader:
    """Reads the frozen weights of a checked model directory, by leaf name: "layers.0.mlp.up_proj.kernel" → [K, N].

    Each kernel of a layer is converted to `kind` on its devices as soon as it is read, so no device or host holds the
    whole model in `dtype`. Embedding, head, norms and biases have `dtype`.

    Attributes:
        stored: places of the tensors, by their names in the checkpoint.
        kind: storage of the layers' kernels (None: plain arrays).
        form: storage of these kernels in the checkpoint (None: it is not quantised).
        entry: where to read these kernels instead, as an earlier run has stored them.
    """

    tensors: Sequence[Tensor]
    stored: Mapping[str, Stored]
    dtype: np.dtype
    kind: StoredKind | None
    form: CheckpointFormat | None
    sharding_rule: ShardingRule
    entry: Entry | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in the files that are read."""
        return sum(self._bytes(tensor) for tensor in self.tensors)

    @property
    def kernels(self) -> dict[str, StoredKernel]:
        """The kernels that reading quantises, by leaf name."""
        if self.form is not None:
            return {}
        return {
            tensor.leaf_name: StoredKernel(kind, (tensor.shape[1], tensor.shape[0]))
            for tensor in self.tensors
            if (kind := self._kind_of(tensor)) is not None
        }

    def read(self, progress: Callable[[int], None] = lambda size: None) -> dict[str, Weight]:
        """Reads everything, a few tensors at a time; several processes read in one order.

        Args:
            progress: called with the bytes of each tensor that is on its devices, from several threads.

        Raises:
            OSError: a file cannot be read.
        """

        def read_weight(tensor: Tensor) -> Weight:
            weight = jax.block_until_ready(self._read(tensor))
            progress(self._bytes(tensor))
            return weight

        with ThreadPoolExecutor(READERS if jax.process_count() == 1 else 1, "read") as threads:
            futures = {tensor.leaf_name: threads.submit(read_weight, tensor) for tensor in self.tensors}
            try:
                wait(futures.values(), return_when=FIRST_EXCEPTION)
                return {name: weight.result() for name, weight in futures.items()}
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def stand_ins(self) -> dict[str, Weight]:
        """Arrays of the same shapes in the same places, to compile with: equal ones are one and the same array."""
        return stand_ins(self.tensors, self.kind, self.dtype, self.sharding_rule)

    def _kind_of(self, tensor: Tensor) -> StoredKind | None:
        return self.kind.of(tensor.experts) if self.kind is not None and tensor.transposed else None

    def _bytes(self, tensor: Tensor) -> int:
        kind = self._kind_of(tensor)
        if self.entry is not None and kind is not None:
            return sum(array.num_bytes for array in kind.arrays(*tensor.leaf_shape).values())
        entries = (self.stored.get(name) for name in tensors_of(tensor, self.form))
        return sum(entry.stop - entry.start for entry in entries if entry is not None)

    def _read(self, tensor: Tensor) -> Weight:
        if self.form is not None and tensor.transposed:
            return dict(read_kernel(tensor, self.form, self.stored, self.sharding_rule))
        kind = self._kind_of(tensor)
        if kind is not None and self.entry is not None:
            return read_cached(tensor, self.entry, kind, self.sharding_rule)
        dtype = jnp.dtype(jnp.float32) if tensor.float32 else self.dtype
        return _read_tensor(tensor, self.stored, dtype, kind, self.sharding_rule)


def _parts(tensor: Tensor, stored: Mapping[str, Stored], config: ModelConfig) -> tuple[Part, ...]:
    """The parts of a leaf as they are stored; a kernel is its own part where it is packed."""
    whole_kernel = (Part(name=tensor.name, shape=tensor.shape),) if tensor.transposed and config.packed else ()
    parts = as_stored(tensor.parts or whole_kernel, stored, config.packed)
    return parts if tensor.parts or any(part.packed for part in parts) else ()


def _text_tensors(
    stored: Mapping[str, Stored], tensors: Sequence[Tensor], config: ModelConfig
) -> tuple[Mapping[str, Stored], Sequence[Tensor]]:
    """Names the tensors as the checkpoint does, and leaves those of a multimodal model out, with a warning."""
    tensor_names = [name for tensor in tensors for name in (tensor.name, *(part.name for part in tensor.parts))]
    names, others = names_in_file(family_named(config.family), config.wrapper, tensor_names, stored)
    parts = ", ".join(dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in others))
    if others:
        warnings.warn(f"only the text part is loaded: {len(others)} tensors of {parts} are left out", stacklevel=3)
    of_text = {name: entry for name, entry in stored.items() if name not in {*others}}

    def renamed(tensor: Tensor) -> Tensor:
        parts = tuple(replace(part, name=names[part.name]) for part in tensor.parts)
        return replace(tensor, name=names[tensor.name], parts=parts)

    return of_text, list(map(renamed, tensors))


def _rule(sharding: Sharding | ShardingRule | None) -> ShardingRule:
    if callable(sharding):
        return sharding
    everywhere = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return lambda name, shape: everywhere


def _read_tensor(
    tensor: Tensor, stored: Mapping[str, Stored], dtype: np.dtype, kind: StoredKind | None, rule: ShardingRule
) -> Weight:
    target = rule(tensor.leaf_name, tensor.leaf_shape)
    on_disk = transposed_sharding(target) if tensor.transposed else target

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = plain_index(index, tensor.shape)
        if tensor.parts:
            return read_parts(tensor.parts, stored, slices)
        return _contiguous(read_slice(stored[tensor.name], tensor.name, slices))

    def leaf_part(index: tuple[slice, ...] | None) -> np.ndarray:
        values = part(index[::-1] if index and tensor.transposed else index)
        return _contiguous(values.T if tensor.transposed else values).astype(dtype)

    if kind is None and on_host(target):
        return jax.make_array_from_callback(tensor.leaf_shape, target, leaf_part)
    x = jax.make_array_from_callback(tensor.shape, on_disk, part)
    if kind is None:
        return _convert(dtype, tensor.transposed, target)(x)
    targets = {name: rule(tensor.leaf_name, array.shape) for name, array in kind.arrays(*tensor.leaf_shape).items()}
    return _quantise(kind, tuple(targets.items()))(x)


def _contiguous(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(x.shape)


@lru_cache(maxsize=256)
def _convert(dtype: np.dtype, transposed: bool, target: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: (x.T if transposed else x).astype(dtype), out_shardings=target)


@lru_cache(maxsize=256)
def _quantise(kind: StoredKind, targets: tuple[tuple[str, Sharding], ...]) -> Callable[[jax.Array], Any]:
    return jax.jit(lambda x: dict(kind.quantise(x.T.astype(jnp.float32))), out_shardings=dict(targets))
