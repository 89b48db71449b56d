"""PEFT folders: adapter_config.json + adapter_model.safetensors, written and read with every tensor checked.

K in · N out · r an adapter's rank
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lorafusion_jax.checkpoint import digests
from lorafusion_jax.checkpoint.digests import find_damage, refuse_damage
from lorafusion_jax.checkpoint.new_folder import new_folder
from lorafusion_jax.checkpoint.peft_config import CONFIG_FILE, config_of, read_config, spec_of
from lorafusion_jax.checkpoint.peft_leaves import Arrays, Leaves
from lorafusion_jax.checkpoint.peft_leaves import put_adapter as put_adapter
from lorafusion_jax.checkpoint.peft_leaves import take_adapter as take_adapter
from lorafusion_jax.errors import CheckpointError, LoraFusionError, RunError, raise_all
from lorafusion_jax.layout.layer import LAYER
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.weights.table import NONE

TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model.model."
_KEY = re.compile(
    re.escape(_PREFIX) + rf"(layers\.(\d{{1,6}})\.(?:{'|'.join(LAYER.modules)})\.(\w+))\.lora_([AB])\.weight"
)


def export_adapter(
    lora_leaves: Leaves,
    spec: AdapterSpec,
    index: int,
    base_name: str,
    to_dir: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    base_quantize: str = NONE,
    replace: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Writes one adapter as a PEFT folder, reads it back and compares it; the folder appears complete or not at all.

    Args:
        lora_leaves: the stacked LoRA weights, see `take_adapter`.
        spec: the adapter.
        index: its place among the stacked adapters.
        base_name: name or path of the base model, as the adapter's users know it.
        to_dir: new or empty folder.
        dtype: of the tensors.
        base_quantize: how the base was stored in training, see `weights.table`; noted in adapter_config.json.
        replace: takes the place of a folder that is there.
        finish: called with the folder before it gets its name; adds model card, tokenizer files.

    Returns:
        The folder.

    Raises:
        CheckpointError: `export.exists`, or `export.not-finite` when a weight is NaN or infinite.
        RunError: `save.no-space`, `save.failed`, or `export.differs` when the folder reads back differently.
    """
    arrays = take_adapter(lora_leaves, spec, index)
    check_finite(arrays, spec)
    kept = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    tensors = {key: array.astype(kept) for key, array in peft_tensors(arrays).items()}
    with new_folder(to_dir, replace=replace) as folder:
        described = json.dumps(config_of(spec, base_name, base_quantize), indent=2)
        (folder / CONFIG_FILE).write_text(described + "\n", encoding="utf-8")
        # not save_file: only their owner may read its files, and it hides the system's error in one of its own
        (folder / TENSOR_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        _check_copy(folder, spec, tensors)
        if finish is not None:
            finish(folder)
    return Path(to_dir)


def read_adapter(folder: str | Path, *, base_name: str | None = None) -> tuple[AdapterSpec, Arrays]:
    """Reads a PEFT folder; its files are compared with SHA256SUMS where there is one.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        base_name: if given, the base model that the adapter must have been made for; only the last parts of the two
            names are compared, since the same model lies in different places.

    Returns:
        specification (named after the folder; a folder does not tell the seed) and
        "layers.0.self_attn.q_proj" → (a [K, r], b [r, N]), float32.

    Raises:
        CheckpointError: `peft.missing-file`, `peft.pickle` (only adapter_model.bin), `peft.bad-config`,
            `peft.damaged`, `peft.unsupported`, `peft.tensors` (missing, extra and misshapen tensors, all in one),
            `peft.other-base`.
        ErrorList: several options that are not supported.
    """
    folder = Path(folder)
    check_digests(folder)
    raw = read_config(folder)
    tensors = read_tensors(folder)
    matches = {key: _KEY.fullmatch(key) for key in tensors}
    present = sorted({match[3] for match in matches.values() if match})
    spec = spec_of(raw, present, folder.resolve().name, str(folder / CONFIG_FILE))
    errors: list[LoraFusionError] = []
    made_for = str(raw.get("base_model_name_or_path") or "")
    if base_name is not None and _last(made_for) != _last(base_name):
        errors.append(
            CheckpointError(
                "peft.other-base",
                where=str(folder / CONFIG_FILE),
                what=f"the adapter was made for '{made_for}', not for '{base_name}'.",
                fix="use that base model; if it is the same one under another name, correct "
                f"base_model_name_or_path in {CONFIG_FILE} and remove {digests.FILE}, which tells of edits",
            )
        )
    problems = _problems(tensors, matches, spec)
    if problems:
        errors.append(
            CheckpointError(
                "peft.tensors",
                f"{TENSOR_FILE} does not hold this adapter.",
                where=f"{folder / TENSOR_FILE}\n    " + "\n    ".join(problems),
            )
        )
    raise_all(errors)
    paths = dict.fromkeys(match[1] for match in matches.values() if match)
    return spec, {path: (_a(tensors, path), _b(tensors, path)) for path in paths}


def check_digests(folder: Path) -> None:
    """Makes sure that the files of an adapter are as they were written; folders of other programs have no digests.

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
    """Names and shapes as PEFT has them: lora_A.weight [r, K], lora_B.weight [N, r]."""
    return {
        f"{_PREFIX}{path}.lora_{part}.weight": np.ascontiguousarray(array.T)
        for path, pair in arrays.items()
        for part, array in zip("AB", pair, strict=True)
    }


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a PEFT folder, as it is."""
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


def _problems(tensors: dict[str, np.ndarray], matches: dict[str, re.Match | None], spec: AdapterSpec) -> list[str]:
    """Says what is missing, extra or misshapen."""
    num_layers = max(1, len({match[2] for match in matches.values() if match}))
    wanted = {
        f"{_PREFIX}layers.{layer}.{LAYER.linear(name).path}.lora_{part}.weight"
        for layer in range(num_layers)
        for name in spec.targets
        for part in "AB"
    }
    problems = [f"missing: {key}" for key in sorted(wanted - set(tensors))]
    problems += [f"extra: {key}" for key in sorted(set(tensors) - wanted)]
    widths: dict[tuple[str, str], int] = {}
    for key in sorted(wanted & set(tensors)):
        match, shape = matches[key], tensors[key].shape
        assert match is not None, key
        width = widths.setdefault((match[3], match[4]), shape[match[4] == "A"] if len(shape) == 2 else 0)
        expected = (spec.rank, width) if match[4] == "A" else (width, spec.rank)
        if shape != expected:
            problems.append(f"misshapen: {key} is {list(shape)}, expected {list(expected)}")
        elif not np.isfinite(tensors[key].astype(np.float32)).all():
            problems.append(f"not finite: {key}")
    return problems


def check_finite(arrays: Arrays, spec: AdapterSpec) -> None:
    """Makes sure that an adapter holds numbers only.

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
    """Reads the folder as a stranger would; what was written must come back."""
    found, arrays = read_adapter(folder)
    same = (found.rank, found.scale, set(found.targets)) == (spec.rank, spec.scale, set(spec.targets))
    again = peft_tensors(arrays)
    if (
        not same
        or again.keys() != tensors.keys()
        or any((again[key] != tensors[key].astype(np.float32)).any() for key in again)
    ):
        raise RunError("export.differs", f"{spec.name}: the written folder reads back differently.", where=str(folder))


def _a(tensors: dict[str, np.ndarray], path: str) -> np.ndarray:
    return np.ascontiguousarray(tensors[f"{_PREFIX}{path}.lora_A.weight"].astype(np.float32).T)


def _b(tensors: dict[str, np.ndarray], path: str) -> np.ndarray:
    return np.ascontiguousarray(tensors[f"{_PREFIX}{path}.lora_B.weight"].astype(np.float32).T)


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold()
