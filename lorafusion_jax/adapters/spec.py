"""Specification of an adapter: rank, scale, dropout, targets, seed. Never imports jax.

A adapters · R padded rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.table import PLAIN, adapter_kind, unknown_kind
from lorafusion_jax.adapters.tokens import TokenRows
from lorafusion_jax.errors import ConfigError, did_you_mean, raise_all
from lorafusion_jax.layout.layer import EXPERTS, RENAMED, saved_path
from lorafusion_jax.layout.layer import TARGETS as TARGETS

ALL_LINEAR, ALL_EXPERTS = "all-linear", "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """One adapter: y = x W + scale · (drop(x) A) B in every targeted projection.

    Args:
        name: unique in a run; also the name of its folder.
        rank: r, number of columns of A; the largest of all projections.
        alpha: numerator of the scale.
        rslora: scale alpha / sqrt(r) instead of alpha / r.
        dropout: probability with which a training step drops an input of A.
        targets: names of the adapted projections, see `resolve_targets`; a single name is allowed.
        kind: its tensors and how a projection uses them, see `lorafusion_jax.adapters.kind`.
        patterns: ranks, alphas and layers that differ between projections (None: none do).
        head: tensors of the objective on the last states (None: it has none).
        tokens: tokens whose rows of the embedding it trains (None: none).
        spare_heads: of a place, heads that its adapters may have.
        seed: determines initial weights and dropout of this adapter, independent of other adapters.

    Raises:
        ConfigError: a value is out of range.

    >>> AdapterSpec(name="law", rank=16, alpha=32).scale
    2.0
    """

    name: str
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS
    kind: str = PLAIN
    patterns: Patterns | None = None
    head: Head | None = None
    tokens: TokenRows | None = None
    spare_heads: tuple[Head, ...] = ()
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.targets, str):  # otherwise its letters would be the names
            object.__setattr__(self, "targets", (self.targets,))
        checks = (
            (
                isinstance(self.rank, Integral) and self.rank >= 1,
                "lora.rank",
                f"rank={self.rank!r} is not a whole number from 1.",
            ),
            (math.isfinite(self.alpha) and self.alpha > 0, "lora.alpha", f"alpha={self.alpha} is not above 0."),
            (0 <= self.dropout < 1, "lora.dropout", f"dropout={self.dropout} is not in [0, 1)."),
            (bool(self.targets), "lora.no-target", "targets is empty: there is nothing to train."),
            ((wrong := unknown_kind(self.kind)) is None, "lora.kind", f"kind must be {wrong}."),
            (
                bool(wrong) or not self.dropout or adapter_kind(self.kind).dropout,
                "lora.dropout",
                f"dropout={self.dropout}, and adapters of kind {self.kind} have none: lora.dropout: 0.",
            ),
            (
                not (self.on_experts and self.dropout),
                "lora.dropout",
                f"dropout={self.dropout}, and adapters of experts have none, as in PEFT: lora.dropout: 0.",
            ),
            (
                not (self.on_experts and self.kind != PLAIN),
                "lora.kind",
                f"kind={self.kind}, and adapters of experts are of kind {PLAIN}.",
            ),
            (
                bool(wrong) or not self._differs or bool(adapter_kind(self.kind).scaled),
                "lora.pattern",
                f"adapters of kind {self.kind} have one rank and one alpha: no rank_pattern, no alpha_pattern.",
            ),
            (
                not (self.on_experts and self.patterns),
                "lora.pattern",
                "adapters of experts are the same in all layers: no patterns, layers or exclusions.",
            ),
            (
                bool(wrong) or self.tokens is None or "peft_type" not in (adapter_kind(self.kind).peft or {}),
                "lora.trainable-tokens",
                f"adapters of kind {self.kind} have no trainable_tokens, in PEFT either.",
            ),
        )
        raise_all([ConfigError(code, f"{self.name}: {message}") for holds, code, message in checks if not holds])

    @property
    def on_experts(self) -> bool:
        """Whether it adapts projections of experts."""
        return any(name in EXPERTS for name in self.targets)

    @property
    def scale(self) -> float:
        """Factor of the low-rank product; with patterns, of projections that none names."""
        return self._scale(self.alpha, self.rank if self.patterns is None else self.patterns.rank)

    def _scale(self, alpha: float, rank: int) -> float:
        scale = adapter_kind(self.kind).scale
        if scale is None:
            return alpha / (math.sqrt(rank) if self.rslora else rank)
        return scale(alpha, rank, self.rslora) if callable(scale) else scale

    @property
    def _differs(self) -> bool:
        return self.patterns is not None and bool(self.patterns.ranks or self.patterns.alphas)

    def has(self, path: str) -> bool:
        """Whether it adapts a projection, "layers.3.self_attn.q_proj"."""
        in_peft = saved_path(path)
        return path.rpartition(".")[2] in self.targets and (self.patterns is None or self.patterns.has(in_peft))

    def rank_at(self, path: str) -> int:
        """Its rank in a projection, at most `rank`."""
        return self.rank if self.patterns is None else self.patterns.rank_of(saved_path(path))

    def scale_at(self, path: str) -> float:
        """Factor of the low-rank product of a projection."""
        if self.patterns is None:
            return self.scale
        path = saved_path(path)
        return self._scale(self.patterns.alpha_of(path), self.patterns.rank_of(path))

    @property
    def drops_columns(self) -> bool:
        """Whether dropout reaches the product with the frozen kernel, because the kind scales the columns of y."""
        return self.dropout > 0 and adapter_kind(self.kind).column_scale is not None

    @property
    def columns(self) -> int:
        """Number of columns of A."""
        return self.rank * adapter_kind(self.kind).columns


def resolve_targets(targets: str | Sequence[str], available: Sequence[str] = TARGETS) -> tuple[str, ...]:
    """Resolves the targets of a job file to names of projections, in the order of `available`.

    Args:
        targets: one name or a list of names. "all-linear" is every projection but those of experts, as in PEFT, and
            "experts" is those. PEFT's names of experts are known, too: "mlp.experts.down_proj".
        available: the projections of the model.

    Raises:
        ConfigError: `lora.unknown-target` for a name that the model does not have, `lora.no-target` for an empty list.

    >>> resolve_targets(["v_proj", "q_proj"])
    ('q_proj', 'v_proj')
    """
    names = spelled(targets, available)
    if not names:
        raise ConfigError(
            "lora.no-target", "lora.targets is empty: there is nothing to train.", fix=f"lora.targets: {ALL_LINEAR}"
        )
    raise_all([_unknown(name, available) for name in dict.fromkeys(names) if name not in available])
    return tuple(name for name in available if name in names)


def spelled(targets: str | Sequence[str], available: Sequence[str] = TARGETS) -> list[str]:
    """The names that targets stand for, in our spelling; unknown ones as they are.

    >>> spelled(["q_proj", "mlp.experts.down_proj"])
    ['q_proj', 'experts_down_proj']
    """
    groups: dict[str, list[str]] = {
        ALL_LINEAR: [name for name in available if name not in EXPERTS],
        ALL_EXPERTS: [name for name in EXPERTS if name in available] or list(EXPERTS),
    }
    for name, path in EXPERTS.items():
        groups |= {path: [name], path.removeprefix("mlp."): [name]}
    for name, path in RENAMED.items():
        if name in available:
            groups[path], short = [name], path.rpartition(".")[2]
            groups.setdefault(short, [short] if short in available else []).append(name)
    names = [targets] if isinstance(targets, str) else list(targets)
    return [name for target in names for name in groups.get(target, [target])]


def refuse_only_in_runs(adapters: Sequence[AdapterSpec]) -> None:
    """Refuses what only training runs can do.

    Raises:
        ConfigError: `lora.pattern`, projections differ; `lora.dropout`, a kind scales columns and has dropout;
            `lora.trainable-tokens`.
    """
    patterned = [spec.name for spec in adapters if spec.patterns is not None]
    dropping = [spec.name for spec in adapters if spec.drops_columns]
    with_tokens = [spec.name for spec in adapters if spec.tokens is not None]
    raise_all(
        [ConfigError("lora.pattern", f"{name}: rank, alpha and layers by pattern need a run.") for name in patterned]
        + [
            ConfigError("lora.dropout", f"{name}: dropout of a kind that scales columns needs a run.")
            for name in dropping
        ]
        + [ConfigError("lora.trainable-tokens", f"{name}: trainable tokens need a run.") for name in with_tokens]
    )


def bank_rank(adapters: Sequence[AdapterSpec], target: str) -> int:
    """Returns R of a projection's stacked weights: the largest rank of the adapters that target it, or 0."""
    return max((spec.rank for spec in adapters if target in spec.targets), default=0)


def bank_columns(adapters: Sequence[AdapterSpec], target: str) -> int:
    """Returns the number of columns of a projection's stacked A: the largest of these adapters, or 0."""
    shapes = {(spec.kind, spec.rank) for spec in adapters if target in spec.targets}  # few, also of a thousand adapters
    return max((rank * adapter_kind(kind).columns for kind, rank in shapes), default=0)


def common_rank(ranks: Sequence[int]) -> int | None:
    """Returns the rank of all adapters, which a program then knows; None if they differ: it gets them as numbers.

    >>> common_rank([16, 16]), common_rank([16, 8])
    (16, None)
    """
    return ranks[0] if len(set(ranks)) == 1 else None


def _unknown(name: str, available: Sequence[str]) -> ConfigError:
    names = [ALL_LINEAR, *available]
    completions = [target for target in names if name and target.startswith(name)]  # of "all", and of "q"
    near = f"did you mean '{completions[0]}'?" if completions else did_you_mean(name, names)
    return ConfigError(
        "lora.unknown-target",
        f"there is no projection '{name}'" + (f"; {near}" if near else "."),
        fix=f"lora.targets: {ALL_LINEAR}   or some of [{', '.join(available)}]",
    )
