"""The adapter entries of a job file: defaults, sweeps, warm starts and validation."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import ValidationError

from lorafusion_jax.config import schema
from lorafusion_jax.config.explain import explain, unknown_key
from lorafusion_jax.config.peft_folder import lora_settings
from lorafusion_jax.config.read import Keys, Source
from lorafusion_jax.config.sections import ADAPTER_KEYS, DEFAULTS, SINGLE_DEFAULTS
from lorafusion_jax.config.sweep import MOST_ADAPTERS, expand
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.choose import objective, unknown_objective


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One adapter entry of the file.

    Attributes:
        keys: location in the file.
        own: its own values in the file.
        single: its values with defaults, and with one value of each list.
    """

    keys: Keys
    own: dict
    single: dict


def adapter_entries(source: Source, values: dict, errors: list) -> list[Entry]:
    """Returns the entries of all adapters; a sweep has one per adapter."""
    entries = values.get("adapters")
    if not isinstance(entries, list) or not entries:
        errors.append(
            ConfigError(
                "config.no-adapters",
                "'adapters' must be a list with at least one adapter.",
                where=source.where(("adapters",)),
                fix="adapters: [{name: law, data: {train: data/law.jsonl}}]",
            )
        )
        return []
    result = []
    for index, own in enumerate(entries):
        keys = ("adapters", index)
        if not isinstance(own, dict):
            errors.append(
                ConfigError(
                    "config.type", f"adapters[{index}] must be a table with a name and data.", where=source.where(keys)
                )
            )
            continue
        errors += [unknown_key(source, (*keys, key), ADAPTER_KEYS) for key in own if key not in ADAPTER_KEYS]
        singles = expand_sweep(_with_start(_with_defaults(values, own), own, source), source, errors)
        result += [Entry(keys=keys, own=own, single=with_objective_defaults(single)) for single in singles]
    if len(result) > MOST_ADAPTERS:
        errors.append(
            ConfigError(
                "config.too-many-adapters",
                f"the file makes {len(result)} adapters; a run has at most {MOST_ADAPTERS}.",
                where=source.where(("adapters",)),
                fix="shorter lists, or several runs",
            )
        )
        return []
    return result


def with_objective_defaults(single: dict) -> dict:
    """Fills in what an adapter's objective has other defaults for. Settings of the file take precedence.

    >>> with_objective_defaults({"name": "law", "lora": {"rank": 4}})
    {'name': 'law', 'lora': {'rank': 4}}
    """
    section = single.get("objective")
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str) or unknown_objective(name) is not None:
        return single
    try:
        defaults = objective(name).defaults
    except ConfigError:  # a broken package, which validation reports
        return single
    filled = dict(single)
    for setting, value in defaults.items():
        key, _, inner = setting.partition(".")
        if isinstance(own := filled.get(key, {}), dict):
            filled[key] = {inner: value, **own}
    return filled


def _with_start(merged: dict, own: dict, source: Source) -> dict:
    """Fills in the settings of the PEFT folder of `init_from`. Settings next to `init_from` take precedence."""
    lora = merged.get("lora")
    if not isinstance(lora, dict) or not isinstance(lora.get("init_from"), str):
        return merged
    own_lora = own.get("lora")
    given = own_lora if isinstance(own_lora, dict) and "init_from" in own_lora else lora
    found = lora_settings(source.path.parent / lora["init_from"])
    return merged | {"lora": lora | {key: value for key, value in found.items() if key not in given}}


def expand_batch(batch: Any, source: Source, errors: list) -> list[Any]:
    """The shared batch section, once per value of the key that adapters may override."""
    if not isinstance(batch, dict) or not isinstance(batch.get("global_samples"), list):
        return [batch]
    swept = expand_sweep({"batch": {"global_samples": batch["global_samples"]}}, source, errors)
    return [batch | single["batch"] for single in swept]


def expand_sweep(entry: dict, source: Source, errors: list) -> list[dict]:
    """The entries of a sweep; none if there are too many, which is an error."""
    try:
        return expand(entry)
    except ConfigError as problem:
        errors.append(ConfigError(problem.code, problem.what, where=str(source.path), why=problem.why, fix=problem.fix))
        return []


def _with_defaults(values: dict, entry: dict) -> dict:
    merged = {key: values[key] for key in SINGLE_DEFAULTS if key in values}
    for key in DEFAULTS:
        merged[key] = values.get(key) or {}
    if isinstance(values.get("batch"), dict) and "global_samples" in values["batch"]:
        merged["batch"] = {"global_samples": values["batch"]["global_samples"]}
    for key, value in entry.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        if both and key == "objective" and value.get("name", merged[key].get("name")) != merged[key].get("name"):
            both = False  # the shared options belong to another objective
        merged[key] = {**merged[key], **value} if both else value
    return {key: merged[key] for key in ADAPTER_KEYS if key in merged}


def validate_adapter(source: Source, entry: Entry, errors: list) -> schema.AdapterConfig | None:
    """Returns the settings of an adapter, or None if errors were added."""
    single = dict(entry.single)
    batch = single.pop("batch", None) or {}
    own_batch = entry.own.get("batch")
    if isinstance(own_batch, dict):
        errors += [
            ConfigError(
                "config.shared-key",
                f"'{key}' is shared by all adapters of a run.",
                where=source.where((*entry.keys, "batch", key)),
                fix=f"set batch.{key} at the top of the file",
            )
            for key in own_batch
            if key != "global_samples"
        ]
    if isinstance(batch, dict) and "global_samples" in batch:
        single["global_samples"] = batch["global_samples"]
    try:
        return schema.AdapterConfig.model_validate(single)
    except ValidationError as problem:
        explained = {
            detail["loc"]: explain(source, entry.keys, schema.AdapterConfig, detail) for detail in problem.errors()
        }
        missing = {detail["loc"] for detail in problem.errors() if detail["type"] == "missing"}
        own = [error for place, error in explained.items() if place in missing or is_own(entry.own, place)]
        if not own and not errors:  # an error of a shared section would be in the list already
            own = [_of_folder(error, single) for error in explained.values()]
        errors += own
        return None


def _of_folder(error: ConfigError, single: dict) -> ConfigError:
    """An error in settings that were read from the folder of lora.init_from."""
    where = f"{error.where}; the value is from lora.init_from={single.get('lora', {}).get('init_from')}"
    return ConfigError(error.code, error.what, where=where, why=error.why, fix=error.fix)


def is_own(entry: dict, location) -> bool:
    """Whether the value at `location` is the adapter's own and not a shared default."""
    if location[:1] == ("global_samples",):
        location = ("batch", "global_samples")
    value = entry
    for key in location:
        if not isinstance(value, dict) or key not in value:
            return isinstance(value, list)  # a value of a sweep
        value = value[key]
    return True
