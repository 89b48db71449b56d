"""Checks of early stops: what decides must be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lorafusion_jax.config import schema
from lorafusion_jax.config.merge import Entry
from lorafusion_jax.config.read import Source
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean

REWARD, SCORE = "eval_reward", "eval_score"
FIX_DATA = "data.eval: FILE, or a share of the training data, e.g. data.eval: 0.05"


def selection_errors(
    valid: Sequence[tuple[Entry, schema.AdapterConfig]],
    train: schema.TrainSettings | None,
    source: Source,
) -> list[LoraFusionError]:
    """Checks that adapters which may stop early are evaluated, and that their metric exists.

    Args:
        train: the section; None if it has errors.
    """
    errors: list[LoraFusionError] = []
    for entry, adapter in valid:
        errors += _adapter_errors(entry, adapter, train, source)
    return errors


def metrics_of(adapter: schema.AdapterConfig) -> list[str]:
    """Names of the metrics that an evaluation of an adapter has."""
    metrics = adapter.objective.chosen.objective.metrics
    of_objective = [REWARD] if adapter.rollout.is_on else [f"eval_{name}" for name in metrics]
    return [schema.HELD_OUT_LOSS, *of_objective, *([] if adapter.eval.score is None else [SCORE])]


def _adapter_errors(
    entry: Entry, adapter: schema.AdapterConfig, train: schema.TrainSettings | None, source: Source
) -> Iterator[LoraFusionError]:
    settings, name = adapter.early_stop, adapter.name

    def where(key: str) -> str:
        keys = ("early_stop", key)
        return source.where((*entry.keys, *keys) if entry.writes(keys) else keys)

    if settings.metric not in (metrics := metrics_of(adapter)):
        yield ConfigError(
            "config.metric",
            f"{name}: early_stop.metric is '{settings.metric}', which its evaluations do not have.",
            where=where("metric"),
            why=f"objective {adapter.objective.name} has {', '.join(metrics)}",
            fix=did_you_mean(settings.metric, metrics) or f"early_stop.metric: {metrics[0]}",
        )
    if settings.patience is None:
        return
    if adapter.data.eval is None:
        message = f"{name}: early_stop.patience needs held-out data."
        yield ConfigError("config.early-stop", message, where=where("patience"), fix=FIX_DATA)
    if train is not None and train.eval_every_steps is None:
        yield ConfigError(
            "config.early-stop",
            "early_stop.patience counts evaluations, but adapters are evaluated only at their end.",
            where=where("patience"),
            fix="train.eval_every_steps: 20",
        )
