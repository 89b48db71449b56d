"""Merges an adapter into its base: writes a full Hugging Face directory, with one tensor in memory at a time.

K in · N out · r an adapter's rank
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import Table
from lorafusion_jax.checkpoint.new_folder import new_folder
from lorafusion_jax.checkpoint.peft import read_adapter
from lorafusion_jax.checkpoint.peft_leaves import NOT_PROJECTIONS, TOKENS, Arrays, tensors_at
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.errors import CheckpointError, LoraFusionError, raise_all
from lorafusion_jax.models.checkpoint import Stored, list_tensors

_EXPORT = "export without --merge; PEFT merges the folder into the model that this base was made of"
_COPIED = (".json", ".jinja", ".txt", ".model")  # configuration, tokenizer, chat template
_TABLES: dict[Table, str] = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
type Rows = tuple[tuple[int, ...], np.ndarray]  # tokens, and their rows as columns [D, M]
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge changed.

    Attributes:
        deltas: tensor → largest |scale · A B| added to it.
        max_rounding: largest rounding error |W + scale · A B - round(W + scale · A B)|.
    """

    deltas: Mapping[str, float]
    max_rounding: float

    @property
    def max_delta(self) -> float:
        return max(self.deltas.values())

    @property
    def num_changed(self) -> int:
        return len(self.deltas)


def merge_adapter(
    base_dir: str | Path,
    adapter_dir: str | Path,
    to_dir: str | Path,
    *,
    kind: str | None = None,
    finish: Callable[[Path], None] | None = None,
) -> MergeReport:
    """Writes the base model with the adapter of a PEFT folder merged into its weights.

    W' = round(W + scale · A B), or what the adapter's kind says, computed in float32, rounded to the checkpoint's dtype

    Rows of trained tokens replace those of the embedding and the head.

    Args:
        base_dir: Hugging Face directory with model.safetensors, or shards and an index.
        adapter_dir, kind: see `read_adapter`.
        to_dir: new or empty folder for weights, index, configuration and tokenizer files.
        finish: called with the temporary folder before it is renamed to `to_dir`.

    Raises:
        CheckpointError: errors of `read_adapter`; `export.exists`; `merge.base`, all tensors of the base that are
            missing or do not fit; `merge.not-finite`.
        RunError: `save.no-space`, `save.failed`.
    """
    return merge_arrays(base_dir, *read_adapter(adapter_dir, kind), to_dir, finish=finish)


def merge_arrays(
    base_dir: str | Path,
    spec: AdapterSpec,
    arrays: Arrays,
    to_dir: str | Path,
    *,
    finish: Callable[[Path], None] | None = None,
) -> MergeReport:
    """`merge_adapter` for an adapter in memory (`read_adapter`, `take_adapter`)."""
    if adapter_kind(spec.kind).shift is not None:
        raise CheckpointError(
            "merge.kind", f"{spec.name}: an adapter of kind {spec.kind} has biases, which the base has no place for."
        )
    if spec.on_experts:
        raise CheckpointError(
            "merge.experts",
            f"{spec.name}: adapters of experts are not merged.",
            fix="export without --merge; PEFT merges the folder",
        )
    base_dir = Path(base_dir)
    places = _places(base_dir)
    targets = {f"model.{path}.weight": path for path in arrays if path not in NOT_PROJECTIONS}
    rows = _token_rows(spec, arrays, places)
    raise_all(_misfits(places, targets, rows, spec, arrays, base_dir))
    deltas: dict[str, float] = {}
    max_rounding = 0.0
    with new_folder(to_dir) as folder:
        _copy_small_files(base_dir, folder)
        for file in sorted({stored.file for stored in places.values()}):
            shutil.copyfile(file, folder / file.name)
            with (folder / file.name).open("r+b") as stream:
                for name in (name for name in targets if places[name].file == file):
                    num_out, num_in = places[name].shape
                    tensors, sizes = tensors_at(spec, arrays, targets[name], (num_in, num_out))
                    merge = partial(adapter_kind(spec.kind).merge, tensors=tensors, sizes=sizes)
                    deltas[name], rounding = _merge(stream, places[name], merge)
                    max_rounding = max(max_rounding, rounding)
                for name in (name for name in rows if places[name].file == file):
                    deltas[name], rounding = _merge(stream, places[name], partial(_replaced, rows=rows[name]))
                    max_rounding = max(max_rounding, rounding)
        if finish is not None:
            finish(folder)
    return MergeReport(deltas=deltas, max_rounding=max_rounding)


def _token_rows(spec: AdapterSpec, arrays: Arrays, places: Mapping[str, Stored]) -> dict[str, Rows]:
    """Returns trained rows by their tensor. A tied head may have a tensor, too, with the same rows."""
    if spec.tokens is None:
        return {}
    stored = dict(zip(spec.tokens.stored.items(), arrays[TOKENS], strict=True))
    rows: dict[str, Rows] = {_TABLES[table]: (ids, array) for (table, ids), array in stored.items()}
    head = _TABLES["head"]
    if head in places and head not in rows and _is_tied(places):
        rows[head] = rows[_TABLES["embed"]]
    return rows


def _replaced(w_DV: np.ndarray, rows: Rows) -> np.ndarray:
    tokens, values_DM = rows
    replaced = w_DV.copy()
    replaced[:, list(tokens)] = values_DM
    return replaced


def _is_tied(places: Mapping[str, Stored]) -> bool:
    """Whether the embedding and a head that is stored, too, are one table by the model's configuration."""
    folder = places[_TABLES["embed"]].file.parent
    return ModelConfig.from_hf(folder).tie_embeddings


def _merge(stream: BinaryIO, stored: Stored, merge: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
    """Merges into one tensor in place: its dtype and shape do not change."""
    stream.seek(stored.start)
    dtype = _DTYPES[stored.dtype]
    before_NK = np.frombuffer(stream.read(stored.stop - stored.start), dtype).reshape(stored.shape).astype(np.float32)
    w_NK = np.asarray(merge(before_NK.T).T, np.float32)
    delta_NK = w_NK - before_NK
    with np.errstate(over="ignore"):
        rounded_NK = w_NK.astype(dtype)
    if not np.isfinite(rounded_NK).all():
        raise CheckpointError(
            "merge.not-finite",
            "a merged weight is not a finite number.",
            where=str(stream.name),
            why=f"{stored.dtype} cannot hold it",
            fix="merge into a float32 or bfloat16 copy of the base",
        )
    stream.seek(stored.start)
    stream.write(rounded_NK.tobytes())
    return float(np.abs(delta_NK).max()), float(np.abs(rounded_NK.astype(np.float32) - w_NK).max())


def _misfits(
    places: Mapping[str, Stored],
    targets: Mapping[str, str],
    rows: Mapping[str, Rows],
    spec: AdapterSpec,
    arrays: Arrays,
    base_dir: Path,
) -> list[LoraFusionError]:
    problems = [problem for name in rows if (problem := _misfit_of_rows(name, rows[name], places))]
    for name, path in targets.items():
        sizes = tensors_at(spec, arrays, path)[1]
        shape = places[name].shape if name in places else ()
        if len(shape) == 2:  # a kind may not know both sizes, which then fit
            shape = (sizes.N or shape[0], sizes.K or shape[1])
        if name not in places:
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


def _misfit_of_rows(name: str, rows: Rows, places: Mapping[str, Stored]) -> str:
    """Why trained rows cannot replace rows of a tensor; empty if they can."""
    tokens, values_DM = rows
    if name not in places:
        return f"missing: {name}"
    stored = places[name]
    if stored.dtype not in _DTYPES:
        return f"quantised: {name} is {stored.dtype}, only {', '.join(_DTYPES)} can be merged into"
    if stored.shape[1:] != values_DM.shape[:1] or stored.shape[0] <= max(tokens):
        needed = f"at least {[max(tokens) + 1, len(values_DM)]}"
        return f"misshapen: {name} is {list(stored.shape)}, the adapter needs {needed}"
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
