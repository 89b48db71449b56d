"""Second step of loading a job: adapter entries with the shared defaults, and with the settings of a warm start.

Files of its base are read where they are at hand: nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lorafusion_jax.adapters.table import unknown_kind
from lorafusion_jax.config.explain import unknown_key
from lorafusion_jax.config.read import Keys, Source
from lorafusion_jax.config.rollout_section import prompts_as_data
from lorafusion_jax.config.schema import ADAPTER_KEYS, DEFAULTS, SINGLE_DEFAULTS
from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.peft.settings import lora_settings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An adapter entry of the file, or after `sweep.expand_entries` one adapter of it.

    Attributes:
        keys: location in the file.
        written: its values in the file.
        values: its values with defaults.
    """

    keys: Keys
    written: dict
    values: dict

    def writes(self, location: Keys) -> bool:
        """Whether the value at `location` is in the entry, and not a shared default."""
        if location[:1] == ("global_samples",):
            location = ("batch", "global_samples")
        value: Any = self.written
        for key in location:
            if not isinstance(value, dict) or key not in value:
                return isinstance(value, list)  # a value of a sweep
            value = value[key]
        return True


def merge_entries(source: Source, values: dict, errors: list[LoraFusionError]) -> list[Entry]:
    """Returns the entries of the file, with lists of sweeps as they are."""
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
    job_entries = []
    for index, table in enumerate(entries):
        keys = ("adapters", index)
        if not isinstance(table, dict):
            message = f"adapters[{index}] must be a table with a name and data."
            errors.append(ConfigError("config.type", message, where=source.where(keys)))
            continue
        errors += [unknown_key(source, (*keys, key), ADAPTER_KEYS) for key in table if key not in ADAPTER_KEYS]
        with_defaults = _with_start(_with_defaults(values, table), table, source, values.get("base"))
        try:
            with_defaults = prompts_as_data(with_defaults)
        except ValueError as problem:
            where = source.where((*keys, "rollout", "prompts"))
            errors.append(
                ConfigError("config.rollout", f"{table.get('name')}: data.train must be {problem}.", where=where)
            )
        job_entries.append(Entry(keys=keys, written=table, values=with_defaults))
    return job_entries


def _with_defaults(values: dict, written: dict) -> dict:
    settings = {key: values[key] for key in SINGLE_DEFAULTS if key in values}
    for key in DEFAULTS:
        settings[key] = values.get(key) or {}
    if isinstance(values.get("batch"), dict) and "global_samples" in values["batch"]:
        settings["batch"] = {"global_samples": values["batch"]["global_samples"]}
    for key, value in written.items():
        both = isinstance(value, dict) and isinstance(settings.get(key), dict)
        if both and key == "objective" and value.get("name", settings[key].get("name")) != settings[key].get("name"):
            both = False  # the shared options belong to another objective
        settings[key] = {**settings[key], **value} if both else value
    return {key: settings[key] for key in ADAPTER_KEYS if key in settings}


def _with_start(merged: dict, written: dict, source: Source, base: Any) -> dict:
    """Fills in the settings of the PEFT folder of `init_from`. Settings next to `init_from` take precedence."""
    lora = merged.get("lora")
    if not isinstance(lora, dict) or not isinstance(lora.get("init_from"), str):
        return merged
    entry_lora = written.get("lora")
    beside = entry_lora if isinstance(entry_lora, dict) and "init_from" in entry_lora else lora
    kind = lora.get("kind")
    kind_exists = isinstance(kind, str) and unknown_kind(kind) is None
    folder = source.path.parent / lora["init_from"]
    of_folder = lora_settings(folder, kind if kind_exists else None, _base_of(base, source.path.parent))
    return merged | {"lora": lora | {key: value for key, value in of_folder.items() if key not in beside}}


def _base_of(base: Any, directory: Path) -> ModelConfig | None:
    """The base model of a job; None where its settings are not what they should be, which is told elsewhere."""
    name, revision = (base.get("model"), base.get("revision")) if isinstance(base, dict) else (None, None)
    if not isinstance(name, str) or not name or not (revision is None or isinstance(revision, str)):
        return None
    return model_of(name, revision, directory)


def base_file(file_name: str, name: str, revision: str | None, directory: Path) -> Path | None:
    """A file of the base: in its folder, or in the hub's cache, where a run finds it, too.

    Args:
        name: folder or hub name of the base.
        directory: of the job file.
    """
    try:
        file = directory / name / file_name
        if file.is_file():
            return file
        from huggingface_hub import try_to_load_from_cache

        cache_path = try_to_load_from_cache(name, file_name, revision=revision)
    except (ImportError, OSError, ValueError):
        return None
    return Path(cache_path) if isinstance(cache_path, str) else None


def model_of(name: str, revision: str | None, directory: Path) -> ModelConfig | None:
    """The shape of the base; None where it cannot be read, which its readers say."""
    file = base_file("config.json", name, revision, directory)
    try:
        return None if file is None else ModelConfig.from_hf(file)
    except (LoraFusionError, OSError, ValueError):
        return None
