"""Combines several adapters into one, tensor by tensor, as PEFT's `add_weighted_adapter` does.

Sources: task arithmetic (Ilharco et al. 2022), TIES (Yadav et al. 2023), DARE (Yu et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError, raise_all
from lorafusion_jax.families.multimodal import IN_PEFT, TEXT_ROOT
from lorafusion_jax.layout.layer import ROOTS
from lorafusion_jax.peft.folder import read_described, write_adapter
from lorafusion_jax.peft.leaves import Arrays
from lorafusion_jax.peft.read_config import Described

Method = Literal["linear", "cat", "ties", "magnitude_prune", "dare_linear", "dare_ties"]
Majority = Literal["total", "frequency"]
type Keep = Callable[[tuple[int, ...], float], np.ndarray]  # shape, density -> bool
PRUNING = ("ties", "magnitude_prune", "dare_linear", "dare_ties")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """How adapters are combined. c_i is the weight of an adapter times its scale, and the result has the scale 1.

    Args:
        method: "cat": A and B side by side, so that the product is exactly Σ c_i A_i B_i, at the sum of the ranks.
            Others work on A and on B on their own, which is a rough approximation of this sum, at the same rank:
            "linear": Σ ±√|c_i| A_i and Σ √|c_i| B_i. "magnitude_prune": the same of the largest values. "ties": of the
            largest values those whose sign most adapters have, and their mean. "dare_linear", "dare_ties": values
            that are drawn, divided by the density, instead of the largest.
        density: share of the values of each tensor that is kept, for all methods but "linear" and "cat".
        majority: of "ties": the sign of the sum, or of most values.
        seed: of the draws of "dare_linear" and "dare_ties".

    Raises:
        ConfigError, ErrorList: `combine.setting`.
    """

    method: Method = "cat"
    density: float | None = None
    majority: Majority = "total"
    seed: int = 0

    def __post_init__(self) -> None:
        prunes = self.method in PRUNING
        methods = ", ".join(get_args(Method))
        checks = (
            (self.method in get_args(Method), f"method must be one of {methods}, not {self.method!r}."),
            (not prunes or (self.density is not None and 0 < self.density <= 1),
             f"{self.method} needs a density above 0, at most 1, not {self.density}."),
            (prunes or self.density is None, f"{self.method} keeps all values: leave density out."),
            (self.majority in get_args(Majority), f"majority must be total or frequency, not {self.majority!r}."),
        )  # fmt: skip
        raise_all([ConfigError("combine.setting", message) for holds, message in checks if not holds])


def combine_adapters(
    adapters: Mapping[str | Path, float],
    to: str | Path,
    *,
    method: Method = "cat",
    density: float | None = None,
    majority: Majority = "total",
    seed: int = 0,
) -> Path:
    """Combines PEFT folders of plain LoRA adapters of one base into a new one.

    Args:
        adapters: folder → weight; a negative weight takes an adapter away.
        to: new or empty folder.
        method, density, majority, seed: see `Combination`.

    Raises:
        LoraFusionError: `combine.setting`, `combine.adapters`; see `read_adapter` and `export_adapter`.
    """
    how = Combination(method=method, density=density, majority=majority, seed=seed)
    folders = [Path(folder) for folder in adapters]
    described = [read_described(folder) for folder in folders]
    _check(folders, [entry for entry, _ in described], list(adapters.values()), how)
    factors = [weight * entry.spec.scale for (entry, _), weight in zip(described, adapters.values(), strict=True)]
    arrays = combined_arrays([arrays for _, arrays in described], factors, how)
    ranks = [entry.spec.rank for entry, _ in described]
    rank = sum(ranks) if method == "cat" else ranks[0]
    targets = tuple(dict.fromkeys(name for entry, _ in described for name in entry.spec.targets))
    spec = AdapterSpec(name=Path(to).name, rank=rank, alpha=rank, targets=targets)
    first = described[0][0]
    roots = [entry.root for entry, _ in described if entry.root not in (TEXT_ROOT, *ROOTS.values())]
    return write_adapter(
        arrays, spec, first.base, to, base_revision=first.revision, multimodal=bool(roots), root=(*roots, IN_PEFT)[0]
    )


def combined_arrays(
    adapters: Sequence[Arrays], factors: Sequence[float], how: Combination, keep: Keep | None = None
) -> Arrays:
    """Combines the tensors of adapters.

    Args:
        factors: c of each adapter.
        keep: chooses the values that DARE keeps (None: draws them).
    """
    draw = np.random.default_rng(how.seed)
    keep = keep or (lambda shape, density: draw.random(shape) < density)
    combined: Arrays = {}
    paths = dict.fromkeys(path for arrays in adapters for path in arrays)
    for path in paths:
        having = [(arrays[path], c) for arrays, c in zip(adapters, factors, strict=True) if path in arrays]
        if how.method == "cat":
            a = np.concatenate([pair[0] * np.float32(c) for pair, c in having], axis=-1)
            combined[path] = a, np.concatenate([pair[1] for pair, _ in having], axis=-2)
            continue
        signed = [math.copysign(math.sqrt(abs(c)), c) for _, c in having]
        a = combined_tensor([pair[0] for pair, _ in having], signed, how, keep)
        b = combined_tensor([pair[1] for pair, _ in having], [abs(factor) for factor in signed], how, keep)
        combined[path] = a, b
    return _same_rank(combined, sum(arrays_rank(arrays) for arrays in adapters)) if how.method == "cat" else combined


def combined_tensor(
    tensors: Sequence[np.ndarray], factors: Sequence[float], how: Combination, keep: Keep
) -> np.ndarray:
    """Combines tensors of one shape, [in, r] or [r, out]."""
    pruned = np.stack([_pruned(tensor, how, keep) for tensor in tensors])
    weighted = pruned * np.asarray(factors, np.float32).reshape(-1, *(1,) * (pruned.ndim - 1))
    if how.method not in ("ties", "dare_ties"):
        return weighted.sum(0)
    votes = pruned if how.majority == "total" else np.sign(pruned)
    agrees = np.sign(pruned) == np.where(votes.sum(0) >= 0, 1, -1)
    return (weighted * agrees).sum(0) / np.maximum(agrees.sum(0), 1).astype(np.float32)


def arrays_rank(arrays: Arrays) -> int:
    """The largest number of columns of A."""
    return max(pair[0].shape[-1] for pair in arrays.values())


def _pruned(tensor: np.ndarray, how: Combination, keep: Keep) -> np.ndarray:
    if how.density is None or how.density == 1:
        return tensor
    # PEFT's tensors are the transposed ones: equal values are kept in its order.
    stored = np.swapaxes(tensor, -1, -2)
    if how.method.startswith("dare"):
        is_kept = keep(stored.shape, how.density)
        return np.swapaxes(np.where(is_kept, stored / np.float32(how.density), np.float32(0)), -1, -2)
    count = int(how.density * stored.size)
    mask = np.zeros(stored.size, bool)
    mask[np.argsort(-np.abs(stored).reshape(-1), kind="stable")[:count]] = True
    return np.swapaxes(np.where(mask.reshape(stored.shape), stored, np.float32(0)), -1, -2)


def _same_rank(arrays: Arrays, rank: int) -> Arrays:
    """Pads with zeros the projections that not all adapters have."""

    def padded(tensor: np.ndarray, axis: int) -> np.ndarray:
        widths = [(0, 0)] * tensor.ndim
        widths[axis] = (0, rank - tensor.shape[axis])
        return np.pad(tensor, widths)

    return {path: (padded(pair[0], -1), padded(pair[1], -2)) for path, pair in arrays.items()}


def _check(folders: Sequence[Path], adapters: Sequence[Described], weights: Sequence[float], how: Combination) -> None:
    errors: list[LoraFusionError] = []

    def refuse(folder: Path, message: str, fix: str = "") -> None:
        errors.append(CheckpointError("combine.adapters", f"{folder.name} {message}", where=str(folder), fix=fix))

    if len(folders) < 2:
        errors.append(ConfigError("combine.adapters", "there is nothing to combine.", fix="two adapters or more"))
    for folder, described, weight in zip(folders, adapters, weights, strict=True):
        spec = described.spec
        if not math.isfinite(weight) or weight == 0:
            refuse(folder, f"has the weight {weight}.", "a number other than 0")
        more = (spec.patterns, spec.head, spec.tokens)
        if spec.kind != PLAIN or spec.on_experts or any(part is not None for part in more):
            refuse(folder, "is not a plain LoRA adapter on all layers.", "other adapters")
        if how.method != "cat" and spec.rank != adapters[0].spec.rank:
            fix = "method cat"
            refuse(folder, f"has rank {spec.rank}, and {folders[0].name} {adapters[0].spec.rank}.", fix)
        if (described.base, described.revision) != (adapters[0].base, adapters[0].revision):
            refuse(folder, f"was made for the base {described.base or '?'}, others for {adapters[0].base or '?'}.")
    raise_all(errors)
