"""Merges an adapter into its base: writes a full Hugging Face directory, with one kernel in memory at a time.

K in · N out · E experts · r an adapter's rank
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import Table
from lorafusion_jax.errors import CheckpointError, LoraFusionError, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.multimodal import names_in_file
from lorafusion_jax.families.table import family_named
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.models.checkpoint import Stored, as_published, list_tensors
from lorafusion_jax.models.expert_files import Part, as_stored, expert_parts
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.peft.leaves import NOT_PROJECTIONS, TOKENS, Arrays, tensors_at

_EXPORT = "export without --merge; PEFT merges the folder into the model that this base was made of"
_COPIED = (".json", ".jinja", ".txt", ".model")  # configuration, tokenizer, chat template
_TABLES: dict[Table, str] = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
type Rows = tuple[tuple[int, ...], np.ndarray]  # tokens, and their rows as columns [D, M]
type Merge = Callable[[np.ndarray], np.ndarray]  # a kernel [K, N] → the merged one
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge changed.

    Attributes:
        deltas: tensor → largest |scale · A B| added to it.
    """

    deltas: Mapping[str, float]

    @property
    def max_delta(self) -> float:
        return max(self.deltas.values())

    @property
    def num_changed(self) -> int:
        return len(self.deltas)


def merge_adapter(
    base_dir: str | Path, adapter_dir: str | Path, to_dir: str | Path, *, kind: str | None = None
) -> MergeReport:
    """Writes the base model with the adapter of a PEFT folder merged into its weights.

    W' = round(W + scale · A B), or what the adapter's kind says, computed in float32, rounded to the checkpoint's dtype

    Rows of trained tokens replace those of the embedding and the head.

    Args:
        base_dir: Hugging Face directory with model.safetensors, or shards and an index.
        adapter_dir, kind: see `read_adapter`.
        to_dir: new or empty folder for weights, index, configuration and tokenizer files.

    Raises:
        CheckpointError: errors of `read_adapter`; `export.exists`; `merge.base`, all tensors of the base that are
            missing or do not fit; `merge.not-finite`.
        RunError: `save.no-space`, `save.failed`.
    """
    return merge_arrays(base_dir, *read_adapter(adapter_dir, kind), to_dir)


def merge_arrays(base_dir: str | Path, spec: AdapterSpec, arrays: Arrays, to_dir: str | Path) -> MergeReport:
    """`merge_adapter` for an adapter in memory (`read_adapter`, `take_adapter`)."""
    base_dir = Path(base_dir)
    places, config = _places(base_dir), ModelConfig.from_hf(base_dir)
    places = as_published(places, config)
    parts = _parts(config, arrays, places)
    rows, shifts = _token_rows(spec, arrays, places, config), _shifts(spec, arrays, places, config)
    raise_all(_misfits(places, parts, rows, spec, arrays, base_dir))
    deltas: dict[str, float] = {}
    with new_folder(to_dir) as folder:
        _copy_small_files(base_dir, folder)
        for file in sorted({stored.file for stored in places.values()}):
            shutil.copyfile(file, folder / file.name)
            with (folder / file.name).open("r+b") as stream:
                for name in (name for name in (*parts, *rows, *shifts) if places[name].file == file):
                    for kernel, in_rows, merge in _kernels(name, places[name], parts, rows, shifts, spec, arrays):
                        delta = _merge(stream, kernel, merge, in_rows=in_rows)
                        deltas[name] = max(deltas.get(name, 0.0), delta)
    return MergeReport(deltas=deltas)


def _parts(config: ModelConfig, arrays: Arrays, places: Mapping[str, Stored]) -> dict[str, tuple[str, Part]]:
    """Returns tensor of the checkpoint → the adapter's projection, and the part of its kernel [N, E · K] there."""
    family, parts = family_named(config.family), {}
    for path in (path for path in arrays if path not in NOT_PROJECTIONS):
        name, layer = path.rpartition(".")[2], int(path.split(".")[1])
        if name in EXPERTS and layer < config.num_layers and name in config.layer(layer).targets:
            parts[path] = expert_parts(family, config.layer(layer).linear(name), layer)
        else:
            parts[path] = (Part(name=family.tensor_name(f"model.{path}.weight"), shape=(), turned=family.turned),)
    names = _names(config, [part.name for path_parts in parts.values() for part in path_parts], places)
    renamed = {
        path: tuple(replace(part, name=names[part.name]) for part in path_parts) for path, path_parts in parts.items()
    }
    return {part.name: (path, part) for path, path_parts in renamed.items() for part in as_stored(path_parts, places)}


def _names(config: ModelConfig, names: Sequence[str], places: Mapping[str, Stored]) -> Mapping[str, str]:
    """Returns the names in the checkpoint, which may be of a multimodal model."""
    family = family_named(config.family)
    every = [
        family.tensor_name(table) for table in _TABLES.values()
    ]  # a checkpoint has them, however it stores experts
    return names_in_file(family, config.wrapper, [*every, *names], places.keys())[0]


def _kernels(
    name: str,
    stored: Stored,
    parts: Mapping[str, tuple[str, Part]],
    rows: Mapping[str, Rows],
    shifts: Mapping[str, np.ndarray],
    spec: AdapterSpec,
    arrays: Arrays,
) -> Iterator[tuple[Stored, bool, Merge]]:
    """Yields the kernels of a tensor, whether they are [K, N] there, and what to do with each [K, N]."""
    if name in shifts:
        yield stored, False, partial(np.add, shifts[name])
        return
    if name in rows:
        yield stored, False, partial(_replaced, rows=rows[name])
        return
    path, part = parts[name]
    merge = adapter_kind(spec.kind).merge
    if path.rpartition(".")[2] not in EXPERTS:
        num_in, num_out = stored.shape if part.turned else stored.shape[::-1]
        tensors, sizes = tensors_at(spec, arrays, path, (num_in, num_out))
        yield stored, part.turned, partial(merge, tensors=tensors, sizes=sizes)
        return
    tensors, sizes = tensors_at(spec, arrays, path)
    columns = slice(part.row, part.row + part.rectangle[0])  # of B: gate or up, or both
    stacked = len(part.shape) == 3
    experts = range(part.shape[0]) if stacked else [part.column // sizes.K]
    size = (stored.stop - stored.start) // len(experts)
    for index, expert in enumerate(experts):
        start = stored.start + index * size
        kernel = replace(stored, shape=stored.shape[-2:], start=start, stop=start + size)
        of_expert = {"lora_a": tensors["lora_a"][expert], "lora_b": tensors["lora_b"][expert][:, columns]}
        yield kernel, stacked and not part.transposed, partial(merge, tensors=of_expert, sizes=sizes)


def _token_rows(
    spec: AdapterSpec, arrays: Arrays, places: Mapping[str, Stored], config: ModelConfig
) -> dict[str, Rows]:
    """Returns trained rows by their tensor. A tied head may have a tensor, too, with the same rows."""
    if spec.tokens is None:
        return {}
    family = family_named(config.family)
    llama = {table: family.tensor_name(name) for table, name in _TABLES.items()}
    names = _names(config, list(llama.values()), places)
    stored = dict(zip(spec.tokens.stored.items(), arrays[TOKENS], strict=True))
    rows: dict[str, Rows] = {names[llama[table]]: (ids, array) for (table, ids), array in stored.items()}
    head, embed = names[llama["head"]], names[llama["embed"]]
    if head in places and head not in rows and config.tie_embeddings:
        rows[head] = rows[embed]
    return rows


def _shifts(
    spec: AdapterSpec, arrays: Arrays, places: Mapping[str, Stored], config: ModelConfig
) -> dict[str, np.ndarray]:
    """Returns what an adapter adds to the biases of its projections, by their tensor.

    Raises:
        CheckpointError: `merge.kind`, the base has no bias that could take it.
    """
    kind, family = adapter_kind(spec.kind), family_named(config.family)
    if kind.shift is None:
        return {}
    llama = {path: family.tensor_name(f"model.{path}.bias") for path in arrays if path not in NOT_PROJECTIONS}
    names, shifts = _names(config, list(llama.values()), places), {}
    for path, name in llama.items():
        tensors, sizes = tensors_at(spec, arrays, path)
        shift_N, stored = np.asarray(kind.shift(tensors, sizes)), places.get(names[name])
        if stored is None or stored.shape != shift_N.shape or stored.dtype not in _DTYPES:
            message = f"{spec.name}: an adapter of kind {spec.kind} has biases, which the base has no place for."
            raise CheckpointError("merge.kind", message, where=names[name], fix="export without --merge")
        shifts[names[name]] = shift_N
    return shifts


def _replaced(w_DV: np.ndarray, rows: Rows) -> np.ndarray:
    tokens, values_DM = rows
    replaced = w_DV.copy()
    replaced[:, list(tokens)] = values_DM
    return replaced


def _merge(stream: BinaryIO, stored: Stored, merge: Merge, *, in_rows: bool) -> float:
    """Merges into one kernel in place: its dtype and shape do not change. Returns the largest change before rounding.

    Args:
        in_rows: it is [K, N] in the file, otherwise [N, K].
    """
    stream.seek(stored.start)
    dtype = _DTYPES[stored.dtype]
    before = np.frombuffer(stream.read(stored.stop - stored.start), dtype).reshape(stored.shape).astype(np.float32)
    merged = np.asarray(merge(before) if in_rows else merge(before.T).T, np.float32)
    delta = merged - before
    with np.errstate(over="ignore"):
        rounded = merged.astype(dtype)
    if not np.isfinite(rounded).all():
        raise CheckpointError(
            "merge.not-finite",
            "a merged weight is not a finite number.",
            where=str(stream.name),
            why=f"{stored.dtype} cannot hold it",
            fix="merge into a float32 or bfloat16 copy of the base",
        )
    stream.seek(stored.start)
    stream.write(rounded.tobytes())
    return float(np.abs(delta).max())


def _misfits(
    places: Mapping[str, Stored],
    parts: Mapping[str, tuple[str, Part]],
    rows: Mapping[str, Rows],
    spec: AdapterSpec,
    arrays: Arrays,
    base_dir: Path,
) -> list[LoraFusionError]:
    problems = [problem for name in rows if (problem := _misfit_of_rows(name, rows[name], places))]
    problems += _misfits_of_experts(parts, spec, arrays)
    for name, (path, part) in parts.items():
        sizes = tensors_at(spec, arrays, path)[1]
        shape = places[name].shape if name in places else ()
        if part.shape:
            shape = part.shape
        elif len(shape) == 2:  # a kind may not know both sizes, which then fit
            shape = (sizes.N or shape[part.turned], sizes.K or shape[not part.turned])[:: -1 if part.turned else 1]
        if part.mxfp4:
            problems.append(f"quantised: {name} is MXFP4, only {', '.join(_DTYPES)} can be merged into")
        elif part.packed or any(f"{part.stem}{mark}" in places for mark in (".qweight", ".weight_packed")):
            problems.append(f"quantised: {name} is packed, only {', '.join(_DTYPES)} can be merged into")
        elif name not in places:
            problems.append(f"missing: {name}")
        elif places[name].dtype not in _DTYPES:
            problems.append(f"quantised: {name} is {places[name].dtype}, only {', '.join(_DTYPES)} can be merged into")
        elif places[name].shape != shape:
            problems.append(f"misshapen: {name} is {list(places[name].shape)}, the adapter needs {list(shape)}")
        elif places[name].stop - places[name].start != math.prod(shape) * _DTYPES[places[name].dtype].itemsize:
            problems.append(f"damaged: {name} has too few or too many bytes")
    return (
        [
            CheckpointError(
                "merge.base",
                "the adapter does not fit this base model.",
                where=f"{base_dir}\n    " + "\n    ".join(problems),
                fix=_EXPORT if any(problem.startswith("quantised") for problem in problems) else "",
            )
        ]
        if problems
        else []
    )


def _misfits_of_experts(parts: Mapping[str, tuple[str, Part]], spec: AdapterSpec, arrays: Arrays) -> list[str]:
    """Compares adapters of experts with the kernels [N, E · K] of the base."""
    of_path: dict[str, list[Part]] = {}
    for path, part in parts.values():
        if part.shape:
            of_path.setdefault(path, []).append(part)
    problems = []
    for path, path_parts in of_path.items():
        sizes, experts = tensors_at(spec, arrays, path)[1], len(arrays[path][0])
        rows = max(part.row + part.rectangle[0] for part in path_parts)
        columns = max(part.column + part.rectangle[1] for part in path_parts)
        if (rows, columns) != (sizes.N, experts * sizes.K):
            shape = f"{experts} experts of {sizes.K} → {sizes.N}"
            problems.append(f"misshapen: the adapter of {path} has {shape}, which the base's tensors do not fit")
    return problems


def _misfit_of_rows(name: str, rows: Rows, places: Mapping[str, Stored]) -> str:
    """Why trained rows cannot replace rows of a tensor; empty if they can."""
    tokens, values_DM = rows
    if name not in places:
        return f"missing: {name}"
    stored = places[name]
    if stored.dtype not in _DTYPES:
        return f"quantised: {name} is {stored.dtype}, only {', '.join(_DTYPES)} can be merged into"
    if stored.shape[1:] != values_DM.shape[:1] or stored.shape[0] <= max(tokens):
        least_shape = f"at least {[max(tokens) + 1, len(values_DM)]}"
        return f"misshapen: {name} is {list(stored.shape)}, the adapter needs {least_shape}"
    return ""


def _copy_small_files(base_dir: Path, folder: Path) -> None:
    for file in sorted(base_dir.iterdir()):
        if file.is_file() and (file.suffix in _COPIED or file.name.upper().startswith(("LICENSE", "NOTICE"))):
            shutil.copyfile(file, folder / file.name)


def _places(base_dir: Path) -> dict[str, Stored]:
    """Reads the headers of all weight files."""
    try:
        return list_tensors(base_dir)
    except LoraFusionError as problem:
        errors = getattr(problem, "errors", [problem])
        raise_all(
            [
                CheckpointError("merge.base", error.what, where=error.where, why=error.why, fix=error.fix)
                for error in errors
            ]
        )
        raise
