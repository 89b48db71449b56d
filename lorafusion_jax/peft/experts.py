"""Adapters of experts in PEFT: parameters in place of modules.

PEFT wraps the module of the experts once for each parameter. The first wrapper is inside the second, so names depend on
which parameters an adapter has: `mlp.experts.base_layer.lora_A.weight` of gate and up, `mlp.experts.lora_A.weight` of
down, and the latter also of the only one.

Experts that are no part of the layer's MLP are `experts` in place of `mlp.experts`.

Where an MLP has an MLP beside its experts, PEFT reads the names of its projections as those of experts, so an adapter
names their weights as parameters, too: `mlp.shared_experts.gate_proj.weight`.

The two orders of experts in the tensors of a file differ:

| tensor | here | in a file | order of its long axis |
|---|---|---|---|
| lora_A | [E, r, K] | [E · r, K] | expert by expert |
| lora_B | [E, N, r] | [N, r · E] | rank by rank, experts fastest |

E experts · K in · N out · r rank
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.adapters.spec import spelled
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.layout.layer import BESIDE, EXPERTS, MIXER, PARALLEL, RENAMED

Tensors = dict[str, np.ndarray]

_THEIRS = re.compile(r"(.*layers\.\d{1,6}\.)(\w+\.)?experts\.(base_layer\.)*(lora_\w+\.weight)")
_OURS = re.compile(rf"(.*layers\.\d{{1,6}}\.)(\w+)\.({'|'.join(EXPERTS)})\.(.+)")


def named_in_peft(targets: Sequence[str], paths: Collection[str]) -> tuple[list[str], list[str]]:
    """PEFT's `target_modules` and `target_parameters` of our targets.

    Args:
        paths: projections of the adapter, "layers.0.self_attn.q_proj".

    >>> named_in_peft(["q_proj", "up_proj"], ["layers.0.mlp.up_proj", "layers.1.mlp.shared_experts.up_proj"])
    (['q_proj'], ['mlp.up_proj.weight', 'mlp.shared_experts.up_proj.weight'])
    """
    inside = [path.split(".", 2)[-1] for path in paths]
    parallel = any(path.startswith(f"{PARALLEL}.") for path in inside)
    module = next((path.partition(".")[0] for path in inside if path.rpartition(".")[2] in EXPERTS), "mlp")
    parameters = [
        path.removeprefix("mlp.") if parallel else _in_module(path, module)
        for name, path in EXPERTS.items() if name in targets
    ]  # fmt: skip
    if module != MIXER and any(path.startswith(tuple(f"{module}." for module in BESIDE)) for path in inside):
        dense = [path for path in inside if path.startswith(f"{module}.") and path.rpartition(".")[2] not in EXPERTS]
        parameters += [f"{path}.weight" for path in dict.fromkeys(dense)]
    others = {*EXPERTS, *(path.split(".")[-2] for path in parameters if path.endswith(".weight"))}
    return list(dict.fromkeys(_in_peft(name, targets) for name in targets if name not in others)), parameters


def _in_peft(name: str, targets: Sequence[str]) -> str:
    """PEFT's name of a projection, with its module where another of that name has no adapter."""
    path = RENAMED.get(name, name)
    short = path.rpartition(".")[2]
    alike = [other for other, renamed in RENAMED.items() if renamed.endswith(f".{short}")]
    return short if all(other in targets for other in alike) else path


def _in_module(path: str, module: str) -> str:
    path = path.replace("mlp.", f"{module}.", 1)
    return path.replace("gate_up_proj", "up_proj") if module == MIXER else path  # whose experts have no gate


def targets_of(raw: Mapping[str, Any]) -> list[str]:
    """Our names of the parameters in an adapter_config.json; others as they are."""
    names = raw.get("target_parameters") or []
    return spelled([_short(name) for name in names]) if isinstance(names, list) else [str(names)]


def our_key(key: str, targets: Sequence[str]) -> str:
    """Our name of a tensor in a PEFT folder.

    >>> our_key("model.layers.3.mlp.experts.base_layer.lora_A.weight", ["experts_gate_up_proj", "experts_down_proj"])
    'model.layers.3.mlp.experts_gate_up_proj.lora_A.weight'
    """
    match = _THEIRS.fullmatch(key)
    if match is None or not targets:
        return key
    present = [name for name in EXPERTS if name in targets]
    name = present[0] if match[3] else present[-1]
    return f"{match[1]}{match[2] or f'{PARALLEL}.'}{name}.{match[4]}"


def their_key(key: str, targets: Collection[str]) -> str:
    """The inverse of `our_key`."""
    match = _OURS.fullmatch(key)
    if match is None:
        return key
    present = [name for name in EXPERTS if name in targets]
    module = "experts" if match[2] == PARALLEL else f"{match[2]}.experts"
    inside = "base_layer." if match[3] != present[-1] else ""
    return f"{match[1]}{module}.{inside}{match[4]}"


def _short(name: Any) -> str:
    """The end of a parameter's name that says which it is: "model.layers.0.mlp.experts.down_proj"."""
    text = str(name).removesuffix(".weight")
    if text != name:
        return text.rpartition(".")[2]
    ends = {path.removeprefix("mlp."): path for path in EXPERTS.values()}  # "experts.down_proj"
    ends["experts.up_proj"] = ends["experts.gate_up_proj"]
    return next((path for end, path in ends.items() if f".{text}".endswith(f".{end}")), text)


def to_file(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Returns the tensors with PEFT's names and shapes."""
    targets = {name for key in tensors if (name := _expert_target(key))}
    return {their_key(key, targets): _flat(key, array) for key, array in tensors.items()}


def from_file(tensors: Mapping[str, np.ndarray], raw: Mapping[str, Any], where: str) -> Tensors:
    """Returns the tensors of a folder with our names and shapes.

    Args:
        raw: adapter_config.json.
        where: file, for messages.

    Raises:
        CheckpointError: `peft.tensors`, a tensor of experts is not a whole number of experts.
    """
    targets, rank = targets_of(raw), raw.get("r")
    rank = rank if type(rank) is int else 0
    tensor_by_key = {our_key(key, targets): array for key, array in tensors.items()}
    problems = [
        f"misshapen: {key} is {list(array.shape)}, which is no whole number of experts of rank {rank}"
        for key, array in tensor_by_key.items()
        if _expert_target(key) and not _is_whole(key, array, rank)
    ]
    if problems:
        raise CheckpointError(
            "peft.tensors", "the file does not hold this adapter.", where=where + "\n    " + "\n    ".join(problems)
        )
    return {key: _stacked(array, rank, key) if _expert_target(key) else array for key, array in tensor_by_key.items()}


def _expert_target(key: str) -> str | None:
    return next((name for name in EXPERTS if f".{name}." in key), None)


def _is_whole(key: str, array: np.ndarray, rank: int) -> bool:
    long = 0 if _is_a(key) else 1
    return array.ndim == 2 and rank > 0 and array.shape[long] % rank == 0


def _is_a(key: str) -> bool:
    return key.endswith("lora_A.weight")


def _flat(key: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 3:
        return array
    if _is_a(key):
        return array.reshape(-1, array.shape[2])
    return np.ascontiguousarray(array.transpose(1, 2, 0)).reshape(array.shape[1], -1)


def _stacked(array: np.ndarray, rank: int, key: str) -> np.ndarray:
    if _is_a(key):
        return array.reshape(-1, rank, array.shape[1])
    return np.ascontiguousarray(array.reshape(array.shape[0], rank, -1).transpose(2, 0, 1))
