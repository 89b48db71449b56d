"""Last step of loading a job: its settings as checked records, with the errors of everything at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from lorafusion_jax.config import schema
from lorafusion_jax.config.auto import CAPACITY
from lorafusion_jax.config.explain import explain, unknown_key
from lorafusion_jax.config.job_checks import (
    lengths_fit,
    mesh_fits,
    names_differ,
    rate_groups_exist,
    references_exist,
    rollouts_fit,
    targets_exist,
    tokens_fit_objectives,
    with_templates,
)
from lorafusion_jax.config.merge import Entry
from lorafusion_jax.config.read import Keys, Source
from lorafusion_jax.config.run_sections import HELD_OUT_LOSS
from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS
from lorafusion_jax.config.sweep import expand_batch, expand_section
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean

REWARD, SCORE = "eval_reward", "eval_score"
FIX_DATA = "data.eval: FILE, or a share of the training data, e.g. data.eval: 0.05"


def validate_job(
    source: Source, values: dict, entries: Sequence[Entry], errors: list[LoraFusionError], auto: tuple[str, ...] = ()
) -> schema.JobConfig | None:
    """Returns the job with its valid adapters, or None if a shared section is wrong or no adapter is valid.

    Args:
        values: all sections of the file.
        entries: its adapters, with single values.
        auto: keys that the planner sets.
    """
    known_keys = (*SHARED, *DEFAULTS, *SINGLE_DEFAULTS, "adapters")
    errors += [unknown_key(source, (key,), known_keys) for key in values if key not in known_keys]
    shared = _shared_sections(source, values, errors)
    _check_defaults(source, values, errors)
    pairs = ((entry, _validate_adapter(source, entry, errors)) for entry in entries)
    valid = [(entry, adapter) for entry, adapter in pairs if adapter is not None]
    adapters = [adapter for _, adapter in valid]
    if shared["batch"] is not None and CAPACITY not in auto:
        errors += lengths_fit(shared["batch"], adapters, source)
    if shared["mesh"] is not None:
        errors += mesh_fits(shared["mesh"], source)
    errors += names_differ(entries, source) + targets_exist(valid, source) + references_exist(valid, source)
    errors += rate_groups_exist(valid, source) + selection_errors(valid, shared["train"], source)
    errors += tokens_fit_objectives(valid, source) + rollouts_fit(valid, source)
    adapters = with_templates(valid, source, errors)
    if not adapters or None in shared.values():
        return None
    directory = str(source.path.parent.absolute())
    return schema.JobConfig(**shared, adapters=tuple(adapters), auto=auto, directory=directory)


def _shared_sections(source: Source, values: dict, errors: list[LoraFusionError]) -> dict[str, Any]:
    """The sections of the whole run; None for one with errors."""
    shared: dict[str, Any] = {
        key: _section(source, (key,), model, _given(values, key), errors)
        for key, model in SHARED.items()
        if key != "batch"
    }
    shared["batch"] = None
    for single in expand_batch(_given(values, "batch"), source, errors):
        shared["batch"] = _section(source, ("batch",), schema.BatchSettings, single, errors)
    return shared


def _check_defaults(source: Source, values: dict, errors: list[LoraFusionError]) -> None:
    """Checks the shared defaults by themselves: an error in one is reported once, not for every adapter."""
    for key, model in DEFAULTS.items():
        for single in expand_section({key: _given(values, key)}, source, errors):
            _section(source, (key,), model, single[key], errors, partial=True)
    for single in expand_section({key: values[key] for key in SINGLE_DEFAULTS if key in values}, source, errors):
        defaults = {key: single[key] for key in SINGLE_DEFAULTS if key in single}
        _section(source, (), schema.AdapterConfig, defaults, errors, partial=True)


def _given(values: dict, key: str) -> Any:
    """A section of the file; `lora:` without a value is an empty one. In a list, a null is a mistake."""
    return {} if values.get(key) is None else values[key]


def _section[M: BaseModel](
    source: Source, keys: Keys, model: type[M], values: Any, errors: list[LoraFusionError], *, partial: bool = False
) -> M | None:
    try:
        return model.model_validate(values)
    except ValidationError as problem:
        errors += [
            explain(source, keys, model, detail)
            for detail in problem.errors()
            if not (partial and detail["type"] == "missing")
        ]
        return None


def _validate_adapter(source: Source, entry: Entry, errors: list[LoraFusionError]) -> schema.AdapterConfig | None:
    """Returns the settings of an adapter, or None if errors were added."""
    values = dict(entry.values)
    batch = values.pop("batch", None) or {}
    entry_batch = entry.written.get("batch")
    if isinstance(entry_batch, dict):
        errors += [
            ConfigError(
                "config.shared-key",
                f"'{key}' is shared by all adapters of a run.",
                where=source.where((*entry.keys, "batch", key)),
                fix=f"set batch.{key} at the top of the file",
            )
            for key in entry_batch
            if key != "global_samples"
        ]
    if isinstance(batch, dict) and "global_samples" in batch:
        values["global_samples"] = batch["global_samples"]
    try:
        return schema.AdapterConfig.model_validate(values)
    except ValidationError as problem:
        errors += _adapter_errors(source, entry, problem, first=not errors)
        return None


def _adapter_errors(source: Source, entry: Entry, problem: ValidationError, *, first: bool) -> list[ConfigError]:
    """The errors of what the entry writes or lacks. Those of shared defaults are reported with their section.

    Args:
        first: there are no other errors, so one in no section must come from the folder of lora.init_from.
    """
    details = problem.errors()
    explained = {detail["loc"]: explain(source, entry.keys, schema.AdapterConfig, detail) for detail in details}
    missing = {detail["loc"] for detail in details if detail["type"] == "missing"}
    of_entry = [error for location, error in explained.items() if location in missing or entry.writes(location)]
    if of_entry or not first:
        return of_entry
    return [_of_folder(error, entry.values) for error in explained.values()]


def _of_folder(error: ConfigError, values: dict) -> ConfigError:
    """An error in settings that were read from the folder of lora.init_from."""
    where = f"{error.where}; the value is from lora.init_from={values.get('lora', {}).get('init_from')}"
    return ConfigError(error.code, error.what, where=where, why=error.why, fix=error.fix)


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
        errors += _selection_errors(entry, adapter, train, source)
    return errors


def metrics_of(adapter: schema.AdapterConfig) -> list[str]:
    """Names of the metrics that an evaluation of an adapter has."""
    metrics = adapter.objective.chosen.objective.metrics
    of_objective = [REWARD] if adapter.rollout.is_on else [f"eval_{name}" for name in metrics]
    return [HELD_OUT_LOSS, *of_objective, *([] if adapter.eval.score is None else [SCORE])]


def _selection_errors(
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
