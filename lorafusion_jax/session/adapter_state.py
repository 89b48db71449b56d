"""The state of one adapter: independent of mesh, place and company.

Checkpoints of runs, states of a service's jobs and saved models of clients are of this format. A folder holds
`state.safetensors` (weights, optimizer state by path, sums of a begun global batch) and `state.json`. The digests are
in the folder, or in that of the checkpoint to which it belongs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import LEAVES as TOKEN_LEAVES
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.digests import find_damage, has_digests, refuse_damage
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.optim.step import Group, transformation, zero_hyper
from lorafusion_jax.session.leaves import HEAD, TOKENS, by_path
from lorafusion_jax.tensor_file import write_tensors

TENSORS, NOTE = "state.safetensors", "state.json"
FIX = "start the adapter from an earlier state, or from the beginning"
FORM, READ = 2, (1, 2)  # 1 has no sums
WEIGHT, OPTIMIZER, SUMS, TOTALS = "weights", "optimizer", "sums", "totals"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """Weights and optimizer state of an adapter after a step, and what it has summed up since.

    Args:
        step: number of steps taken.
        data: digest of its samples and their order.
        weights: "layers.self_attn.q_proj.lora_a" → [L, K, r], float32, and other leaves.
        optimizer: arrays of its optimizer state by path, for all layers.
        sums: of the gradients of a begun global batch, by leaf, [devices, L, K, r]; empty if none is begun.
        totals: sums of the loss and metrics of that batch, [devices].
        alive: whether its last step was taken.
    """

    step: int
    data: str
    weights: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray] = field(default_factory=dict)
    totals: Mapping[str, np.ndarray] = field(default_factory=dict)
    alive: bool = True

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def write(self, folder: Path) -> Path:
        """Writes a new folder atomically.

        Raises:
            RunError: `save.no-space`, `save.failed`.
        """
        with new_folder(folder, replace=True) as draft:
            self.write_files(draft)
        return folder

    def write_files(self, folder: Path) -> None:
        """Writes its files into a folder, without digests."""
        write_tensors(folder / TENSORS, self._tensors())
        note = {"form": FORM, "step": self.step, "data": self.data, "alive": self.alive}
        (folder / NOTE).write_text(json.dumps(note), encoding="utf-8")

    def _tensors(self) -> dict[str, np.ndarray]:
        parts = {WEIGHT: self.weights, OPTIMIZER: self.optimizer, SUMS: self.sums, TOTALS: self.totals}
        return {f"{part}/{name}": np.asarray(leaf) for part, leaves in parts.items() for name, leaf in leaves.items()}

    @staticmethod
    def read(folder: Path, adapter: AdapterConfig) -> AdapterState:
        """Reads a folder and compares it with its digests.

        Raises:
            CheckpointError: `state.damaged`; see `read_files`.
        """
        of_slot = folder.absolute().parent.parent  # state/SLOT of state/SLOT/adapters/NAME
        if not has_digests(folder) and not has_digests(of_slot):
            fix = f"the folder of a save_state; or {FIX}"
            raise CheckpointError("state.damaged", f"{folder} holds no state.", fix=fix)
        files = [(folder.absolute() / name).relative_to(of_slot).as_posix() for name in (TENSORS, NOTE)]
        damage = find_damage(folder) if has_digests(folder) else find_damage(of_slot, files)
        refuse_damage("state.damaged", damage, FIX)
        return AdapterState.read_files(folder, adapter)

    @staticmethod
    def read_files(folder: Path, adapter: AdapterConfig) -> AdapterState:
        """Reads a folder whose digests were compared.

        Raises:
            CheckpointError: `state.damaged`; `state.version`, another version wrote it; `state.mismatch`, it belongs to
                another optimizer.
        """
        try:
            note, tensors = json.loads((folder / NOTE).read_text()), load_file(folder / TENSORS)
        except (OSError, ValueError, SafetensorError) as problem:
            raise CheckpointError("state.damaged", f"{folder} cannot be read.", why=str(problem), fix=FIX) from None
        form = note.get("form") if isinstance(note, dict) else None
        if form not in READ:
            raise CheckpointError(
                "state.version",
                f"{folder} has format {form}; this version reads {READ[0]} and {READ[1]}.",
                fix="use the version of lorafusion-jax that wrote it",
            )
        parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in (WEIGHT, OPTIMIZER, SUMS, TOTALS)}
        for name, tensor in tensors.items():
            part, _, leaf = name.partition("/")
            parts.setdefault(part, {})[leaf] = tensor
        state = AdapterState(
            step=note["step"],
            data=note["data"],
            weights=parts[WEIGHT],
            optimizer=parts[OPTIMIZER],
            sums=parts[SUMS],
            totals=parts[TOTALS],
            alive=note.get("alive", True),
        )
        check_optimizer(adapter, state, str(folder))
        return state


def check_optimizer(adapter: AdapterConfig, state: AdapterState, where: str) -> None:
    """Raises `state.mismatch` unless the optimizer's arrays are those of the adapter's optimizer."""
    head = adapter.objective.chosen.head
    leaf_of = {leaf.name: leaf for leaf in adapter_kind(adapter.lora.adapter_kind).leaves}
    leaf_of |= {f"{TOKENS}{table}": leaf for table, leaf in TOKEN_LEAVES.items()}
    leaf_of |= {} if head is None else {f"{HEAD}{key}": leaf for key, leaf in head.by_key.items()}
    leaves = {name: leaf_of.get(name) or leaf_of.get(name.rpartition(".")[2]) for name in state.weights}
    trained = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.trainable}
    groups = {name: Group(leaf.lr_group, leaf.decay) for name, leaf in trained.items()}
    shapes = {name: jax.ShapeDtypeStruct(state.weights[name].shape, state.weights[name].dtype) for name in trained}
    empty = by_path(jax.eval_shape(transformation(adapter.optim, zero_hyper(adapter.optim), groups).init, shapes))
    expected = {path: (leaf.shape, leaf.dtype) for path, leaf in empty.items()}
    stored = {path: (leaf.shape, leaf.dtype) for path, leaf in state.optimizer.items()}
    if wrong := [path for path in expected | stored if stored.get(path) != expected.get(path)]:
        raise CheckpointError(
            "state.mismatch",
            f"{where} is not a state of {adapter.name} with optimizer {adapter.optim.name}.",
            where=wrong[0],
            fix="continue with the optimizer that wrote it",
        )
