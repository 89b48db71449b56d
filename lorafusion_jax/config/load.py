"""Loads a job file into a `JobConfig`: overrides, defaults, sweeps and validation. All errors are reported together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from lorafusion_jax.config import schema
from lorafusion_jax.config.explain import RENAMED, explain, unknown_key
from lorafusion_jax.config.overrides import overridden
from lorafusion_jax.config.peft_folder import lora_settings
from lorafusion_jax.config.read import Keys, Source, read_source
from lorafusion_jax.config.sweep import MOST_ADAPTERS, expand
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all
from lorafusion_jax.modules.spec import resolve_targets
from lorafusion_jax.optim.schedules import schedule
from lorafusion_jax.optim.table import optimizer

SHARED: dict[str, type[BaseModel]] = {  # one value for the whole run
    "base": schema.BaseSettings,
    "batch": schema.BatchSettings,
    "mesh": schema.MeshSettings,
    "save": schema.SaveSettings,
    "train": schema.TrainSettings,
    "report": schema.ReportSettings,
}
DEFAULTS: dict[str, type[BaseModel]] = {  # shared defaults that every adapter may override
    "data": schema.DataSettings,
    "lora": schema.LoraSettings,
    "optim": schema.OptimSettings,
    "objective": schema.ObjectiveSettings,
}
MOST_DEVICES = 4096  # of a mesh
SINGLE_DEFAULTS = ("epochs", "seed", "weight")
ADAPTER_KEYS = ("name", *DEFAULTS, "batch", *SINGLE_DEFAULTS)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> schema.JobConfig:
    """Reads a job file, applies `key=value` overrides and validates everything.

    Args:
        path: YAML or TOML file.
        overrides: dotted settings, e.g. `train.max_steps=20`, `adapters.law.lora.rank=8`. `optim.lr=1e-4` is the shared
            default, for adapters without their own value, as in the file.

    Raises:
        ConfigError, ErrorList: all errors of the file, with their lines.
    """
    return parse_config(read_source(Path(path)), overrides)


def examine_config(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    """Like `load_config`, but returns the errors with the valid part of the job, so that more can be checked."""
    return _validate(read_source(Path(path)), overrides)


def parse_config(source: Source, overrides: Sequence[str] = ()) -> schema.JobConfig:
    """Validates a parsed job file; see `load_config`."""
    config, errors = _validate(source, overrides)
    raise_all(errors)
    assert config is not None
    return config


def _validate(source: Source, overrides: Sequence[str]) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    errors: list[LoraFusionError] = list(source.problems)
    source, values = overridden(source, overrides, errors)
    errors += [
        unknown_key(source, (key,), [*SHARED, *DEFAULTS, *SINGLE_DEFAULTS, "adapters"])
        for key in values
        if key not in (*SHARED, *DEFAULTS, *SINGLE_DEFAULTS, "adapters")
    ]
    shared: dict[str, Any] = {
        key: _section(source, (key,), model, values.get(key, {}), errors)
        for key, model in SHARED.items()
        if key != "batch"
    } | {"batch": None}
    batch = None
    for single in _expand_batch(values.get("batch", {}), source, errors):
        batch = shared["batch"] = _section(source, ("batch",), schema.BatchSettings, single, errors)
    for key, model in DEFAULTS.items():
        for single in _expand_sweep({key: values.get(key, {})}, source, errors):
            _section(source, (key,), model, single[key], errors, partial=True)
    for single in _expand_sweep({key: values[key] for key in SINGLE_DEFAULTS if key in values}, source, errors):
        own = {key: single[key] for key in SINGLE_DEFAULTS if key in single}
        _section(source, (), schema.AdapterConfig, own, errors, partial=True)
    entries = _entries(source, values, errors)
    valid = [(entry, adapter) for entry in entries if (adapter := _adapter(source, entry, errors)) is not None]
    adapters = [adapter for _, adapter in valid]
    if batch is not None:
        errors += _lengths_fit(batch, adapters, source)
    if shared["mesh"] is not None:
        errors += _mesh_fits(shared["mesh"], source)
    errors += _names_differ(entries, source) + _targets_exist(valid, source)
    config = None
    if adapters and None not in shared.values():
        config = schema.JobConfig(**shared, adapters=tuple(adapters), directory=str(source.path.parent.absolute()))
    return config, _unique(errors)


def dump_config(config: schema.JobConfig) -> str:
    """Writes a resolved configuration as YAML that `read_resolved` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_resolved(path: Path) -> schema.JobConfig:
    """Reads the `config.yaml` of a run folder. Old names of settings are accepted.

    Raises:
        ConfigError: `run.config`.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        _use_new_names(values)
        return schema.JobConfig.model_validate(values, context=schema.BEGUN)
    except (
        OSError,
        yaml.YAMLError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as problem:  # invalid dates are ValueErrors
        raise ConfigError(
            "run.config",
            f"{path} is not the configuration of a run.",
            why=str(problem),
            fix="restore it from a copy; run.json also has the settings, under config",
        ) from None


def _use_new_names(values: dict) -> None:
    for (section, old), (_, new) in RENAMED.items():
        if old in values.get(section, {}):
            values[section][new] = values[section].pop(old)


def override_resolved(config: schema.JobConfig, overrides: Sequence[str]) -> schema.JobConfig:
    """Applies `key=value` settings to a configuration that is already resolved.

    Raises:
        ConfigError, ErrorList: a setting does not exist, or its value is invalid.
    """
    errors: list[LoraFusionError] = []
    source, values = overridden(
        Source(path=Path("config.yaml"), values=config.model_dump(mode="json")), overrides, errors
    )
    raise_all(errors)
    try:
        return schema.JobConfig.model_validate(values, context=schema.BEGUN)
    except ValidationError as problem:
        raise_all(_unique([explain(source, (), schema.JobConfig, detail) for detail in problem.errors()]))
        raise


def _section[M: BaseModel](
    source: Source, keys: Keys, model: type[M], values: Any, errors: list, *, partial: bool = False
) -> M | None:
    try:
        return model.model_validate(values if values is not None else {})
    except ValidationError as problem:
        errors += [
            explain(source, keys, model, detail)
            for detail in problem.errors()
            if not (partial and detail["type"] == "missing")
        ]
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One adapter entry of the file.

    Attributes:
        keys: location in the file.
        own: its own values in the file.
        single: its values with defaults, and with one value of each list.
    """

    keys: Keys
    own: dict
    single: dict


def _entries(source: Source, values: dict, errors: list) -> list[_Entry]:
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
        singles = _expand_sweep(_with_start(_with_defaults(values, own), own, source), source, errors)
        result += [_Entry(keys=keys, own=own, single=single) for single in singles]
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


def _with_start(merged: dict, own: dict, source: Source) -> dict:
    """An adapter that goes on from a PEFT folder has its settings, but for those that stand beside `init_from`."""
    lora = merged.get("lora")
    if not isinstance(lora, dict) or not isinstance(lora.get("init_from"), str):
        return merged
    own_lora = own.get("lora")
    beside = own_lora if isinstance(own_lora, dict) and "init_from" in own_lora else lora
    found = lora_settings(source.path.parent / lora["init_from"])
    return merged | {"lora": lora | {key: value for key, value in found.items() if key not in beside}}


def _expand_batch(batch: Any, source: Source, errors: list) -> list[Any]:
    """The shared batch section, once per value of the key that adapters may override."""
    if not isinstance(batch, dict) or not isinstance(batch.get("global_samples"), list):
        return [batch]
    swept = _expand_sweep({"batch": {"global_samples": batch["global_samples"]}}, source, errors)
    return [batch | single["batch"] for single in swept]


def _expand_sweep(entry: dict, source: Source, errors: list) -> list[dict]:
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


def _adapter(source: Source, entry: _Entry, errors: list) -> schema.AdapterConfig | None:
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
        errors += [
            explain(source, entry.keys, schema.AdapterConfig, detail)
            for detail in problem.errors()
            if detail["type"] == "missing" or _is_own(entry.own, detail["loc"])
        ]
        return None


def _is_own(entry: dict, location) -> bool:
    """Whether the value at `location` is the adapter's own and not a shared default."""
    if location[:1] == ("global_samples",):
        location = ("batch", "global_samples")
    value = entry
    for key in location:
        if not isinstance(value, dict) or key not in value:
            return isinstance(value, list)  # a value of a sweep
        value = value[key]
    return True


def _unique(errors: list[LoraFusionError]) -> list[LoraFusionError]:
    return list({str(error): error for error in errors}.values())  # a sweep repeats the errors of its entry


def _names_differ(entries: Sequence[_Entry], source: Source) -> list[LoraFusionError]:
    """Names are folders, and some file systems are case-insensitive."""
    places: dict[str, list[tuple[str, Keys]]] = {}
    for entry in entries:
        if isinstance(name := entry.single.get("name"), str):
            places.setdefault(name.casefold(), []).append((name, entry.keys))
    errors: list[LoraFusionError] = []
    for _, named in sorted(places.items()):
        if "=" in named[0][0]:
            errors.append(
                ConfigError(
                    "config.name",
                    f"the name '{named[0][0]}' contains '='.",
                    where=source.where((*named[0][1], "name")),
                    why="names are folders, and vllm --lora-modules name=path splits there",
                    fix=named[0][0].replace("=", "-"),
                )
            )
        if len(named) > 1:
            (first, _), (second, keys) = named[:2]
            same = f"two adapters are called '{first}'."
            errors.append(
                ConfigError(
                    "config.duplicate-name",
                    same if first == second else f"'{first}' and '{second}' differ only in case.",
                    where=source.where(keys),
                    fix="give each adapter its own name",
                )
            )
    return errors


def _mesh_fits(mesh: schema.MeshSettings, source: Source) -> list[LoraFusionError]:
    devices = mesh.stages * mesh.replicas
    if devices <= MOST_DEVICES:
        return []
    return [
        ConfigError(
            "config.mesh",
            f"stages={mesh.stages} · data={mesh.data} · fsdp={mesh.fsdp} are {devices} devices.",
            where=source.where(("mesh",)),
            why=f"a run has at most {MOST_DEVICES}",
        )
    ]


def _lengths_fit(
    batch: schema.BatchSettings, adapters: Sequence[schema.AdapterConfig], source: Source
) -> list[LoraFusionError]:
    capacity, tile = batch.largest, batch.tile_tokens
    typed = [text for keys, text in source.overrides if keys[-1] in ("max_length", "capacity_tokens")]
    errors: list[LoraFusionError] = []
    if odd := [size for size in batch.sizes if size % tile]:
        fitting = sorted({_round_up(size, tile) for size in batch.sizes})
        errors.append(
            ConfigError(
                "config.capacity",
                f"capacity_tokens={odd[0]} is not a multiple of tile_tokens={tile}.",
                where=source.where(("batch", "capacity_tokens")),
                fix=f"batch.capacity_tokens: {fitting[0] if len(fitting) == 1 else fitting}",
            )
        )
    return errors + [
        ConfigError(
            "config.max-length",
            f"{adapter.name}: {_texts_prefix(adapter)}data.max_length={adapter.data.max_length} does not fit into a "
            f"microbatch of {capacity} tokens.",
            where=f"{', '.join(typed)} on the command line" if typed else str(source.path),
            fix=f"batch.capacity_tokens: {_round_up(_largest_sample(adapter), tile)}   or   data.max_length: "
            f"{capacity // adapter.objective.chosen.objective.num_segments}",
        )
        for adapter in adapters
        if _largest_sample(adapter) > capacity
    ]


def _largest_sample(adapter: schema.AdapterConfig) -> int:
    """Maximum tokens of a sample, over all its texts."""
    return adapter.data.max_length * adapter.objective.chosen.objective.num_segments


def _texts_prefix(adapter: schema.AdapterConfig) -> str:
    count = adapter.objective.chosen.objective.num_segments
    return f"{count} texts of " if count > 1 else ""


def _targets_exist(valid: Sequence[tuple[_Entry, schema.AdapterConfig]], source: Source) -> list[LoraFusionError]:
    errors: list[LoraFusionError] = []
    for entry, adapter in valid:
        try:
            resolve_targets(adapter.lora.targets)
        except LoraFusionError as problem:
            own = _is_own(entry.own, ("lora", "targets"))
            where = source.where((*entry.keys, "lora", "targets") if own else ("lora", "targets"))
            errors += [
                ConfigError(one.code, f"{entry.own['name']}: {one.what}" if own else one.what, where=where, fix=one.fix)
                for one in getattr(problem, "errors", [problem])
            ]
    return errors


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def ineffective(config: schema.JobConfig) -> list[str]:
    """Lists settings that are given but have no effect."""
    notes = []
    for adapter in config.adapters:
        optim = adapter.optim
        fields = type(optim).model_fields
        given = {key for key in optim.model_fields_set if getattr(optim, key) != fields[key].default}
        unread = {"b1", "b2", "eps", "momentum"} - set(optimizer(optim.name).options)
        notes += [f"{adapter.name}: optim.{key} has no effect with {optim.name}" for key in sorted(given & unread)]
        if "min_lr_ratio" in given and not schedule(optim.schedule).falls:
            notes.append(f"{adapter.name}: optim.min_lr_ratio has no effect with a {optim.schedule} schedule")
    return list(dict.fromkeys(notes))
