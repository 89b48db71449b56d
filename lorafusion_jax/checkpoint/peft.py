"""Writes and reads PEFT folders (adapter_config.json and adapter_model.safetensors) and checks every tensor.

K in · N out · r an adapter's rank
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint import digests
from lorafusion_jax.checkpoint.digests import find_damage, refuse_damage
from lorafusion_jax.checkpoint.new_folder import new_folder
from lorafusion_jax.checkpoint.peft_leaves import Arrays, Leaves
from lorafusion_jax.checkpoint.peft_leaves import put_adapter as put_adapter
from lorafusion_jax.checkpoint.peft_leaves import take_adapter as take_adapter
from lorafusion_jax.config.peft_config import CONFIG_FILE, Described, config_of, describe, read_config
from lorafusion_jax.config.peft_folder import KEY, PREFIX, TENSOR_FILE
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.layout.layer import PATHS
from lorafusion_jax.tensor_file import write_tensors
from lorafusion_jax.weights.table import NONE

TRANSPOSED_ROWS = 64


def export_adapter(
    lora_leaves: Leaves,
    spec: AdapterSpec,
    index: int,
    base_name: str,
    to_dir: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    base_quantize: str = NONE,
    base_revision: str | None = None,
    replace: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Writes one adapter as a PEFT folder atomically, and compares what it reads back.

    Args:
        lora_leaves: the stacked LoRA weights, see `take_adapter`.
        spec: the adapter.
        index: its place among the stacked adapters.
        base_name: name or path of the base model for users of the adapter.
        to_dir: new or empty folder.
        dtype: dtype of the tensors.
        base_quantize: storage of the base in training, see `weights.table`; written to adapter_config.json.
        base_revision: commit of a base model on the hub.
        replace: replace an existing folder.
        finish: called with the temporary folder before it is renamed, e.g. to add a model card and tokenizer files.

    Returns:
        The folder.

    Raises:
        CheckpointError: `export.exists`, or `export.not-finite` when a weight is NaN or infinite.
        RunError: `save.no-space`, `save.failed`, or `export.differs` when the folder reads back differently.
    """
    arrays = take_adapter(lora_leaves, spec, index)
    check_finite(arrays, spec)
    kept = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    tensors = {key: array.astype(kept, copy=False) for key, array in peft_tensors(arrays).items()}
    with new_folder(to_dir, replace=replace) as folder:
        said = json.dumps(config_of(spec, base_name, base_quantize, base_revision), indent=2)
        (folder / CONFIG_FILE).write_text(said + "\n", encoding="utf-8")
        write_tensors(folder / TENSOR_FILE, tensors)
        _check_copy(folder, spec, tensors)
        if finish is not None:
            finish(folder)
    return Path(to_dir)


def read_adapter(folder: str | Path) -> tuple[AdapterSpec, Arrays]:
    """Reads a PEFT folder and compares its files with SHA256SUMS, if there is one.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.

    Returns:
        The specification (named after the folder, without the seed, which a folder does not hold) and
        "layers.0.self_attn.q_proj" → (a [K, r], b [r, N]), float32. If rank_pattern gives a projection a lower
        rank, its r is lower than that of the specification. An adapter of some layers has no arrays of the others.

    Raises:
        CheckpointError: `peft.missing-file`, `peft.pickle` (only adapter_model.bin), `peft.bad-config`,
            `peft.damaged`, `peft.unsupported`, `peft.tensors` (missing, extra and misshapen tensors, all in one).
        ErrorList: several options that are not supported.
    """
    described, arrays = read_described(Path(folder))
    return described.spec, arrays


def read_described(folder: Path) -> tuple[Described, Arrays]:
    """Like `read_adapter`, with the full description of the adapter."""
    described, tensors = _read(folder)
    return described, {path: (_to_array(tensors, path, "A"), _to_array(tensors, path, "B")) for path in _paths(tensors)}


def _read(folder: Path) -> tuple[Described, dict[str, np.ndarray]]:
    """Returns the description of a folder and its tensors, which fit it."""
    check_digests(folder)
    raw = read_config(folder)
    tensors = read_tensors(folder)
    paths = _paths(tensors)
    described = describe(raw, paths, folder.resolve().name, str(folder / CONFIG_FILE))
    problems = _problems(tensors, paths, described)
    if problems:
        raise CheckpointError(
            "peft.tensors",
            f"{TENSOR_FILE} does not hold this adapter.",
            where=f"{folder / TENSOR_FILE}\n    " + "\n    ".join(problems),
        )
    return described, tensors


def check_digests(folder: Path) -> None:
    """Checks that the files of an adapter are unchanged. Folders of other programs have no digests.

    Raises:
        CheckpointError: `peft.damaged`.
    """
    if digests.has_digests(folder):
        refuse_damage(
            "peft.damaged",
            find_damage(folder, (CONFIG_FILE, TENSOR_FILE)),
            fix=f"take another copy or another step; if you changed the file yourself, remove {folder / digests.FILE}",
        )


def peft_tensors(arrays: Arrays) -> dict[str, np.ndarray]:
    """Converts to PEFT's names and shapes: lora_A.weight [r, K], lora_B.weight [N, r]."""
    return {
        f"{PREFIX}{path}.lora_{part}.weight": _transpose(array)
        for path, pair in arrays.items()
        for part, array in zip("AB", pair, strict=True)
    }


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Reads every tensor of a PEFT folder."""
    file = folder / TENSOR_FILE
    if not file.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise CheckpointError(
                "peft.pickle",
                "adapter_model.bin is a pickle, which can run any program; it is not read.",
                where=str(folder),
                fix="load it with peft where you trust it, then model.save_pretrained(folder, safe_serialization=True)",
            )
        raise CheckpointError("peft.missing-file", f"{folder} has no {TENSOR_FILE}.")
    try:
        with safe_open(file, "np") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, TypeError) as problem:
        raise CheckpointError(
            "peft.damaged", f"{TENSOR_FILE} cannot be read.", where=str(file), why=str(problem)
        ) from None


def _problems(tensors: dict[str, np.ndarray], paths: Sequence[str], described: Described) -> list[str]:
    """Lists missing, extra and misshapen tensors."""
    wanted = {f"{PREFIX}{path}.lora_{part}.weight" for path in _wanted_paths(paths, described) for part in "AB"}
    problems = [f"missing: {key}" for key in sorted(wanted - set(tensors))]
    problems += [f"extra: {key}" for key in sorted(set(tensors) - wanted)]
    widths: dict[tuple[str, str], int] = {}
    for key in sorted(wanted & set(tensors)):
        match, shape = KEY.fullmatch(key), tensors[key].shape
        assert match is not None, key
        width = widths.setdefault((match[3], match[4]), shape[match[4] == "A"] if len(shape) == 2 else 0)
        rank = described.ranks[match[1]]
        expected = (rank, width) if match[4] == "A" else (width, rank)
        if shape != expected:
            problems.append(f"misshapen: {key} is {list(shape)}, expected {list(expected)}")
        elif not np.isfinite(tensors[key].astype(np.float32, copy=False)).all():
            problems.append(f"not finite: {key}")
    return problems


def _wanted_paths(paths: Sequence[str], described: Described) -> Iterable[str]:
    """Returns the required projections: of the named layers, or of all layers up to the last one present."""
    if described.layers is None and described.some_layers:
        return paths
    count = max(1, len({path.split(".")[1] for path in paths}))
    return [
        f"layers.{layer}.{PATHS[name]}"
        for layer in (range(count) if described.layers is None else described.layers)
        for name in described.spec.targets
    ]


def check_finite(arrays: Arrays, spec: AdapterSpec) -> None:
    """Checks that all weights of an adapter are finite.

    Raises:
        CheckpointError: `export.not-finite`.
    """
    bad = [path for path, pair in arrays.items() if not all(np.isfinite(array).all() for array in pair)]
    if bad:
        raise CheckpointError(
            "export.not-finite",
            f"{spec.name}: {len(bad)} weights are NaN or infinite.",
            where=", ".join(bad[:4]),
            fix="export an earlier checkpoint",
        )


def _check_copy(folder: Path, spec: AdapterSpec, tensors: dict[str, np.ndarray]) -> None:
    """Reads the folder back, with the checks of the public reader, and compares its tensors with what was written."""
    found, again = _read(folder)
    same = (found.spec.rank, found.spec.scale, set(found.spec.targets)) == (spec.rank, spec.scale, set(spec.targets))
    if not same or again.keys() != tensors.keys() or any((again[key] != tensors[key]).any() for key in again):
        raise RunError("export.differs", f"{spec.name}: the written folder reads back differently.", where=str(folder))


def _paths(tensors: dict[str, np.ndarray]) -> list[str]:
    """Returns the projections that have tensors."""
    return list(dict.fromkeys(match[1] for key in tensors if (match := KEY.fullmatch(key))))


def _to_array(tensors: dict[str, np.ndarray], path: str, part: Literal["A", "B"]) -> np.ndarray:
    return _transpose(tensors[f"{PREFIX}{path}.lora_{part}.weight"].astype(np.float32, copy=False))


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """Returns the transposed matrix in C order, made in blocks that fit into caches: up to eight times as fast."""
    made = np.empty(matrix.shape[::-1], matrix.dtype)
    for start in range(0, len(matrix), TRANSPOSED_ROWS):
        rows = slice(start, start + TRANSPOSED_ROWS)
        made[:, rows] = matrix[rows].T
    return made
