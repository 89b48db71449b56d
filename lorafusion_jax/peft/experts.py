"""Adapters of experts in PEFT: parameters in place of modules.

PEFT wraps the module of the experts once for each parameter. The first wrapper is inside the second, so names depend on
which parameters an adapter has: `mlp.experts.base_layer.lora_A.weight` of gate and up, `mlp.experts.lora_A.weight` of
down, and the latter also of the only one.

Experts that are no part of the layer's MLP are `experts` in place of `mlp.experts`.

Where an MLP has an MLP beside its experts, PEFT reads the names of its projections as those of experts, so an adapter
names their weights as parameters, too: `mlp.shared_experts.gate_proj.weight`.

Where a list of PEFT's has the names of projections that experts had in files before transformers 5, PEFT makes one
parameter of gate and up, of twice the rank and alpha. An adapter has one rank here, so the others get as many columns
of zeros: they stay zero, and the sum is the same.

The two orders of experts in the tensors of a file differ:

| tensor | here | in a file | order of its long axis |
|---|---|---|---|
| lora_A | [E, r, K] | [E · r, K] | expert by expert |
| lora_B | [E, N, r] | [N, r · E] | rank by rank, experts fastest |

E experts · K in · N out · r rank
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.adapters.patterns import matches, unusable_pattern
from lorafusion_jax.adapters.spec import spelled
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.layout.layer import BESIDE, EXPERTS, MIXER, PARALLEL, RENAMED

Tensors = dict[str, np.ndarray]

_THEIRS = re.compile(r"(.*layers\.\d{1,6}\.)(\w+\.)?experts\.(base_layer\.)*(lora_\w+\.weight)")
_OURS = re.compile(rf"(.*layers\.\d{{1,6}}\.)(\w+)\.({'|'.join(EXPERTS)})\.(.+)")
READ_AS_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # by PEFT, in a list, where a model has experts
_PATH = re.compile(r"(layers\.\d{1,6}\..+)\.lora_\w+\.weight$")


def named_in_peft(
    targets: Sequence[str], paths: Collection[str], *, lets_out: bool = False
) -> tuple[list[str], list[str]]:
    """PEFT's `target_modules` and `target_parameters` of our targets.

    Args:
        paths: projections of the adapter, "layers.0.self_attn.q_proj".
        lets_out: the adapter lets projections out. Otherwise layers without an MLP have experts in its place.

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
    dense = [path for path in inside if path.startswith(f"{module}.") and path.rpartition(".")[2] not in EXPERTS]
    is_beside = any(path.startswith(tuple(f"{module}." for module in BESIDE)) for path in dense)
    with_mlp = {path.split(".")[1] for path, part in zip(paths, inside, strict=True) if part in dense}
    in_some = not lets_out and 0 < len(with_mlp) < len({path.split(".")[1] for path in paths})
    in_some = in_some and any(part.rpartition(".")[2] in READ_AS_EXPERTS for part in dense)
    if module != MIXER and (is_beside or in_some):
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
    if "." not in text:  # a parameter of that name; those of other projections are called "weight"
        ends = {end.removeprefix("experts."): path for end, path in ends.items()}
    return next((path for end, path in ends.items() if f".{text}".endswith(f".{end}")), text)


def to_file(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Returns the tensors with PEFT's names and shapes."""
    targets = {name for key in tensors if (name := _expert_target(key))}
    return {their_key(key, targets): _flat(key, array) for key, array in tensors.items()}


def from_file(tensors: Mapping[str, np.ndarray], raw: Mapping[str, Any], where: str) -> tuple[Tensors, dict[str, Any]]:
    """Returns the tensors of a folder with our names and shapes, and its settings with one rank.

    Args:
        raw: adapter_config.json.
        where: file, for messages.

    Raises:
        CheckpointError: `peft.tensors`, a tensor of experts is not a whole number of experts.
    """
    targets = targets_of(raw)
    tensor_by_key = {our_key(key, targets): array for key, array in tensors.items()}
    paths = {key: match[1] for key in tensor_by_key if (match := _PATH.search(key))}
    one_rank = with_one_rank(raw, paths.values())
    ranks = {key: _whole(_number_at(path, raw, "rank_pattern", "r")) for key, path in paths.items()}
    problems = [
        f"misshapen: {key} is {list(array.shape)}, which is no whole number of experts of rank {ranks[key]}"
        for key, array in tensor_by_key.items()
        if _expert_target(key) and not _is_whole(key, array, ranks[key])
    ]
    if problems:
        raise CheckpointError(
            "peft.tensors", "the file does not hold this adapter.", where=where + "\n    " + "\n    ".join(problems)
        )
    in_shape = {
        key: _stacked(array, ranks[key], key) if _expert_target(key) else array for key, array in tensor_by_key.items()
    }
    if one_rank != raw:
        in_shape |= {key: _padded(in_shape[key], rank, one_rank["r"], key) for key, rank in ranks.items()}
    return in_shape, one_rank


def with_one_rank(raw: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """adapter_config.json with the largest rank as the only one, where patterns give experts others of equal scale.

    Args:
        paths: projections that the tensors speak of.

    >>> patterns = {"rank_pattern": {".*gate_up_proj": 8}, "alpha_pattern": {".*gate_up_proj": 16}}
    >>> raw = {"r": 4, "lora_alpha": 8} | patterns
    >>> with_one_rank(raw, ["layers.0.self_attn.q_proj", "layers.0.mlp.experts_gate_up_proj"])
    {'r': 8, 'lora_alpha': 16, 'rank_pattern': {}, 'alpha_pattern': {}}
    """
    patterns, paths = [raw.get(key) or {} for key in ("rank_pattern", "alpha_pattern")], list(dict.fromkeys(paths))
    of_experts = [path for path in paths if _expert_target(f"{path}.")]
    if not of_experts or not all(isinstance(pattern, dict) for pattern in patterns):
        return dict(raw)
    names = {name for pattern in patterns for name in pattern}
    if any(unusable_pattern(name) for name in names):
        return dict(raw)
    matched = {name for name in names if any(matches(name, _path_in_peft(path)) for path in of_experts)}
    others = [path for path in paths if path not in of_experts]
    numbers = [
        (_whole(_number_at(path, raw, "rank_pattern", "r")), _number_at(path, raw, "alpha_pattern", "lora_alpha"))
        for path in [*of_experts, ""]
    ]
    is_number = all(rank and type(alpha) in (int, float) for rank, alpha in numbers)
    if not matched or not is_number or any(matches(name, path) for name in matched for path in others):
        return dict(raw)
    root = math.sqrt if raw.get("use_rslora") else float
    largest, (rank, alpha) = max(rank for rank, _ in numbers), numbers[-1]
    if any(not math.isclose(other / root(some), alpha / root(rank)) for some, other in numbers):
        return dict(raw)
    alpha *= root(largest) / root(rank)
    rests = [{name: number for name, number in pattern.items() if name not in matched} for pattern in patterns]
    settings = {"r": largest, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha}
    return {**raw, **settings, "rank_pattern": rests[0], "alpha_pattern": rests[1]}


def _number_at(path: str, raw: Mapping[str, Any], pattern: str, default: str) -> Any:
    """The rank or the alpha of a projection in PEFT."""
    entries = raw.get(pattern) or {}
    if not isinstance(entries, dict) or not _expert_target(f"{path}.") or any(map(unusable_pattern, entries)):
        return raw.get(default)
    in_peft = _path_in_peft(path)
    return next((number for name, number in entries.items() if matches(name, in_peft)), raw.get(default))


def _path_in_peft(path: str) -> str:
    """PEFT's path of a parameter of experts, "layers.0.mlp.experts.down_proj"."""
    layer, module, name = path.rsplit(".", 2)
    inside = _in_module(EXPERTS[name], module)
    return f"{layer}.{inside.removeprefix(f'{PARALLEL}.')}"


def _whole(number: Any) -> int:
    return number if type(number) is int else 0


def _padded(array: np.ndarray, rank: int, largest: int, key: str) -> np.ndarray:
    """A tensor with zeros up to the largest rank; as it is if it has another rank than its own."""
    axis = array.ndim - 2 if _is_a(key) else array.ndim - 1
    if array.ndim < 2 or array.shape[axis] != rank:
        return array
    padded = np.zeros((*array.shape[:axis], largest, *array.shape[axis + 1 :]), array.dtype)
    padded[(..., slice(rank), *(slice(None),) * (array.ndim - 1 - axis))] = array
    return padded


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
