"""Adapters of another job file that join a begun run: read with the run's own settings, refused with others."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from lorafusion_jax.config.auto import take_auto
from lorafusion_jax.config.data_sources import Sources, is_file
from lorafusion_jax.config.load import parse_config, read_job_file
from lorafusion_jax.config.read import Source
from lorafusion_jax.config.references import reference_of
from lorafusion_jax.config.schema import SHARED, AdapterConfig, JobConfig, ObjectiveSettings, Section
from lorafusion_jax.config.sweep import MOST_ADAPTERS
from lorafusion_jax.config.values import as_in_file
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all

OF_ADAPTERS = ("batch", "global_samples")  # the one shared key that only gives adapters a default


def read_joining(path: Path, run: JobConfig, overrides: Sequence[str] = ()) -> tuple[AdapterConfig, ...]:
    """Reads a job file whose adapters are to join a run.

    What all adapters of a run share (base, mesh, capacity …) is the run's where the file leaves it out. Relative paths
    start at the file's folder.

    Raises:
        ConfigError, ErrorList: every mistake of the file; `add.other-settings`, it says something else than the run;
            see `check_names`.
    """
    source = read_job_file(path)
    config = parse_config(_with_shared(source, run), overrides)
    raise_all([*_differences(source, config, run)])
    check_names(config.adapters, run)
    names = [adapter.name for adapter in config.adapters]
    return tuple(_with_moved_paths(adapter, names, config.directory, run.directory) for adapter in config.adapters)


def check_names(adapters: Sequence[AdapterConfig], run: JobConfig) -> None:
    """Makes sure that adapters can join a run under their names.

    Raises:
        ConfigError, ErrorList: `add.name`; `add.too-many`.
    """
    names = {adapter.name.casefold(): adapter.name for adapter in run.adapters}
    errors = []
    for adapter in adapters:
        if (other := names.get(adapter.name.casefold())) is not None:
            message = "the run has an adapter" if other == adapter.name else "the run has, in another case, an adapter"
            errors.append(
                ConfigError("add.name", f"{message} '{adapter.name}' already.", fix="give the new one another name")
            )
        names[adapter.name.casefold()] = adapter.name
    if len(run.adapters) + len(adapters) > MOST_ADAPTERS:
        message = f"the run would have {len(run.adapters) + len(adapters)} adapters and can have {MOST_ADAPTERS}."
        errors.append(ConfigError("add.too-many", message, fix="train them in another run"))
    raise_all(errors)


def add_adapters(run: JobConfig, adapters: Sequence[AdapterConfig]) -> JobConfig:
    """A run's settings with more adapters, which come last."""
    newcomers = [adapter.model_copy(update={"joined": True}) for adapter in adapters]
    return run.model_copy(update={"adapters": (*run.adapters, *newcomers)})


def select_adapters(config: JobConfig, names: Collection[str]) -> JobConfig:
    """The settings of some adapters, in the order of all."""
    return config.model_copy(update={"adapters": tuple(a for a in config.adapters if a.name in names)})


def _with_shared(source: Source, run: JobConfig) -> Source:
    """The file with the run's shared settings where it has none."""
    shared = run.model_dump(mode="json", include=set(SHARED))
    del shared[OF_ADAPTERS[0]][OF_ADAPTERS[1]]
    values = copy.deepcopy(dict(source.values))
    take_auto(values)  # the run has chosen
    for section, settings in shared.items():
        section_values = values.get(section)
        # anything else is a mistake that the examination names
        if section_values is None or isinstance(section_values, dict):
            values[section] = settings | (section_values or {})
    return dataclasses.replace(source, values=values)


def _differences(source: Source, config: JobConfig, run: JobConfig) -> Iterator[LoraFusionError]:
    for section in SHARED:
        added_section, run_section = getattr(config, section), getattr(run, section)
        for key in type(added_section).model_fields:
            value, run_value = getattr(added_section, key), getattr(run_section, key)
            if value == run_value or (section, key) == OF_ADAPTERS:
                continue
            if (section, key) == ("base", "model") and _model_folder(config) == _model_folder(run):
                continue
            yield ConfigError(
                "add.other-settings",
                f"{section}.{key} is {as_in_file(run_value)} in the run and {as_in_file(value)} here.",
                where=source.where((section, key)),
                why="all adapters of a run share it",
                fix=f"leave {section}.{key} out, or train these adapters in a run of their own",
            )


def _model_folder(config: JobConfig) -> Path:
    return (Path(config.directory) / config.base.model).resolve()


def _with_moved_paths(adapter: AdapterConfig, names: Sequence[str], from_folder: str, to_folder: str) -> AdapterConfig:
    """The adapter with paths that hold in the run's configuration.

    Args:
        names: of all adapters of its file.
    """
    if Path(from_folder) == Path(to_folder):
        return adapter

    def moved[T](path: T) -> T | str:
        return str(Path(from_folder) / path) if isinstance(path, str) and is_file(path) else path

    def moved_sources[T](sources: T) -> T | Sources:
        if not isinstance(sources, tuple):
            return sources
        return tuple(dataclasses.replace(source, path=moved(source.path)) for source in sources)

    files = {"train": moved_sources(adapter.data.train), "eval": moved_sources(adapter.data.eval)}
    data = adapter.data.model_copy(update=files)
    lora = adapter.lora.model_copy(update={"init_from": moved(adapter.lora.init_from)})
    changes: dict[str, Section] = {"data": data, "lora": lora}
    reference = reference_of(adapter, names)
    if reference is not None and reference.kind == "folder":
        objective = adapter.objective.model_dump() | {"reference": moved(reference.name)}
        changes["objective"] = ObjectiveSettings.model_validate(objective)  # `model_copy` would keep `chosen`
    return adapter.model_copy(update=changes)
