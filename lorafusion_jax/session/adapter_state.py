"""The state of one adapter between two of its steps: independent of mesh, place and company.

A folder holds `state.safetensors` (weights and optimizer state by path) and `state.json`, with digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.checkpoint.digests import find_damage, refuse_damage
from lorafusion_jax.checkpoint.new_folder import new_folder
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.optim.step import transformation, zero_hyper
from lorafusion_jax.session.leaves import by_path
from lorafusion_jax.tensor_file import write_tensors

TENSORS, NOTE = "state.safetensors", "state.json"
FORM = 1
WEIGHT, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """Weights and optimizer state of an adapter after a step.

    Args:
        step: number of steps taken.
        data: digest of its samples and their order.
        weights: "layers.self_attn.q_proj.lora_a" → [L, K, r], float32, and other leaves.
        optimizer: arrays of its optimizer state by path, for all layers.
    """

    step: int
    data: str
    weights: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]

    def write(self, folder: Path) -> Path:
        """Writes a new folder atomically.

        Raises:
            RunError: `save.no-space`, `save.failed`.
        """
        tensors = {f"{WEIGHT}/{name}": np.asarray(leaf) for name, leaf in self.weights.items()}
        tensors |= {f"{OPTIMIZER}/{path}": np.asarray(leaf) for path, leaf in self.optimizer.items()}
        with new_folder(folder, replace=True) as draft:
            write_tensors(draft / TENSORS, tensors)
            (draft / NOTE).write_text(json.dumps({"form": FORM, "step": self.step, "data": self.data}))
        return folder

    @staticmethod
    def read(folder: Path, adapter: AdapterConfig) -> AdapterState:
        """Reads a folder and compares it with its digests.

        Raises:
            CheckpointError: `state.damaged`; `state.version`, another version wrote it; `state.mismatch`, it belongs to
                another optimizer.
        """
        fix = "start the adapter from an earlier state, or from the beginning"
        refuse_damage("state.damaged", find_damage(folder), fix)
        try:
            note, tensors = json.loads((folder / NOTE).read_text()), load_file(folder / TENSORS)
        except (OSError, ValueError, SafetensorError) as problem:
            raise CheckpointError("state.damaged", f"{folder} cannot be read.", why=str(problem), fix=fix) from None
        if not isinstance(note, dict) or note.get("form") != FORM:
            form = note.get("form") if isinstance(note, dict) else None
            raise CheckpointError(
                "state.version",
                f"{folder} has format {form}; this version reads format {FORM}.",
                fix="use the version of lorafusion-jax that wrote it",
            )
        weights = {name.removeprefix(f"{WEIGHT}/"): t for name, t in tensors.items() if name.startswith(f"{WEIGHT}/")}
        return AdapterState(
            step=note["step"],
            data=note["data"],
            weights=weights,
            optimizer=_optimizer(adapter, weights, tensors, folder),
        )


def _optimizer(
    adapter: AdapterConfig, weights: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """Returns the optimizer's arrays, which must be those of the adapter's optimizer."""
    constant = {leaf.name for leaf in adapter_kind(adapter.lora.adapter_kind).leaves if not leaf.trainable}
    trained = {name: leaf for name, leaf in weights.items() if name.rpartition(".")[2] not in constant}
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in trained.items()}
    empty = by_path(jax.eval_shape(transformation(adapter.optim, zero_hyper(adapter.optim)).init, shapes))
    wanted = {f"{OPTIMIZER}/{path}": (leaf.shape, leaf.dtype) for path, leaf in empty.items()}
    stored = {path: (leaf.shape, leaf.dtype) for path, leaf in tensors.items()}
    wrong = [path for path, sizes in wanted.items() if stored.get(path) != sizes]
    if wrong or len(tensors) != len(wanted) + len(weights):
        raise CheckpointError(
            "state.mismatch",
            f"{folder} is not a state of {adapter.name} with optimizer {adapter.optim.name}.",
            where=wrong[0] if wrong else "",
            fix="continue with the optimizer that wrote it",
        )
    return {path: tensors[f"{OPTIMIZER}/{path}"] for path in empty}
