"""Finds what to generate with: a run, a PEFT folder, or a base model alone. Reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.checkpoint.base_model import base_directory, find_base, similar_folder
from lorafusion_jax.checkpoint.begun_folder import read_start
from lorafusion_jax.checkpoint.folder import CONFIG, RunFolder, no_run
from lorafusion_jax.config.schema import BaseSettings
from lorafusion_jax.config.specs import adapter_spec, model_targets
from lorafusion_jax.errors import CheckpointError, ConfigError, did_you_mean, quoted
from lorafusion_jax.peft.leaves import exported_spec
from lorafusion_jax.peft.read_config import CONFIG_FILE, did_you_mean_adapter, read_config
from lorafusion_jax.peft.settings import describe_folder
from lorafusion_jax.readable import has_file, has_folder
from lorafusion_jax.weights.table import NONE

BASE_NAME = "base"  # the name of the base without an adapter
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """A PEFT folder.

    Attributes:
        kind, head: of its adapter (None: the folder says its kind; it has no head).
    """

    name: str
    folder: Path
    kind: str | None = None
    head: Head | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A base model and adapters for it.

    Attributes:
        base: its folder.
        adapters: those that can generate, in order.
        asked: names to generate with, where a prompt names none.
        dtype, quantize: of the base, as in a job file.
    """

    base: Path
    adapters: tuple[AdapterSource, ...]
    asked: tuple[str, ...]
    dtype: str = DTYPE
    quantize: str = NONE


def find_source(
    source: str | Path,
    adapters: Sequence[str] = (),
    *,
    base: str | Path | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    step: int | None = None,
    best: bool = False,
) -> Source:
    """Finds a base and adapters.

    Args:
        source: run folder, PEFT folder, or folder or hub name of a base model.
        adapters: names of adapters of the run, NAME=FOLDER for a PEFT folder, or "base" for the base alone (none: all
            adapters of the run, or the only one).
        base: another folder of the base model.
        dtype, quantize: of the base (None: those of the run, otherwise bfloat16 and none).
        step: exported step of a run's adapters (None: the newest).
        best: take the step of each adapter with the best held-out result.

    Raises:
        LoraFusionError: `generate.source`, `generate.unknown-adapter`, `generate.no-weights`; see `find_base`.
    """
    path = Path(source)
    _check_setting("dtype", dtype, get_args(BaseSettings.model_fields["dtype"].annotation))
    if has_file(path / CONFIG):
        origin = _of_run(RunFolder(path), adapters, base, step, best=best)
    elif step is not None or best:
        option = "best" if best else f"step={step}"
        raise ConfigError("generate.source", f"{option} needs a run folder, and {source} is none.")
    elif has_file(path / CONFIG_FILE):
        origin = _of_folder(path, base)
    elif has_file(path / "config.json") or not (has_file(path) or has_folder(path)):
        fix = "a run folder, a PEFT folder, a model folder, or org/name of a hub"
        origin = Source(base=find_base(Path(), str(source if base is None else base), fix=fix), adapters=(), asked=())
    elif read_start(path) is not None:
        raise no_run(path, CONFIG)
    else:
        message = f"{source} is neither a run, nor an adapter, nor a model."
        why = f"it has no {CONFIG}, {CONFIG_FILE} or config.json"
        fix = did_you_mean_adapter(path, path) or similar_folder(path, str(path), "lorafusion generate RUN 'a prompt'")
        raise CheckpointError("generate.source", message, why=why, fix=fix)
    origin = _with_asked(origin, adapters)
    return replace(origin, dtype=dtype or origin.dtype, quantize=quantize or origin.quantize)


def _check_setting(name: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        fix = f"one of: {', '.join(choices)}"
        raise ConfigError("generate.setting", f"{name} cannot be {value!r}.", where=name, fix=fix)


def _of_run(
    run: RunFolder, adapters: Sequence[str], base: str | Path | None, step: int | None, *, best: bool
) -> Source:
    config = run.read_config()
    names = [adapter.name for adapter in config.adapters]
    for name in adapters:
        if name not in (*names, BASE_NAME) and "=" not in name:
            raise unknown_adapter(name, names)
    selection = [name for name in adapters if name in names]
    sources = []
    for name in selection or ([] if adapters else names):
        folder = run.exported_step(name, step, best=best)
        if folder is None or not folder.is_dir():
            if not selection and step is None:
                continue  # it has not been saved yet, and nobody named it
            at = "of a best step" if best else "yet" if step is None else f"of step {step}"
            steps = ", ".join(exported.name for exported in run.exported(name))
            message, fix = f"{name} has no exported weights {at}.", steps or f"lorafusion resume {quoted(run.path)}"
            raise CheckpointError("generate.no-weights", message, where=str(run.path), fix=fix)
        spec = exported_spec(adapter_spec(config.adapter(name), model_targets(config)))
        sources.append(AdapterSource(name=name, folder=folder, kind=spec.kind, head=spec.head))
    if not sources and not adapters:
        fix = f"lorafusion resume {quoted(run.path)}"
        raise CheckpointError("generate.no-weights", f"{run.path} has no exported weights yet.", fix=fix)
    if base is None:
        directory = base_directory(config)
        check_base(run.read_record()["base_files"], base_digests(directory), directory)
    else:
        directory = find_base(Path(), str(base))
    return Source(
        base=directory,
        adapters=tuple(sources),
        asked=tuple(source.name for source in sources),
        dtype=config.base.dtype,
        quantize=config.base.quantize,
    )


def _of_folder(folder: Path, base: str | Path | None) -> Source:
    described, quantize = describe_folder(folder), read_config(folder).get("base_quantize", NONE)
    step_folder = folder.resolve()
    of_adapter = step_folder.parent  # RUN/adapters/NAME of RUN/adapters/NAME/step-000010
    run = RunFolder(of_adapter.parent.parent)
    is_of_run = (run.path / CONFIG).is_file() and run.latest(of_adapter.name) is not None
    name = of_adapter.name if is_of_run else step_folder.name
    if base is None and is_of_run:
        base = base_directory(run.read_config())
    if base is None and not described.base:
        message = f"{folder / CONFIG_FILE} does not name the adapter's base model."
        raise CheckpointError("generate.no-base", message, fix="--base FOLDER")
    directory = find_base(
        Path(), described.base if base is None else str(base), described.revision if base is None else None,
        fix="--base FOLDER: the folder of the adapter's base model",
    )  # fmt: skip
    return Source(base=directory, adapters=(AdapterSource(name=name, folder=folder),), asked=(name,), quantize=quantize)


def _with_asked(source: Source, adapters: Sequence[str]) -> Source:
    """Adds adapters of the form NAME=FOLDER, and checks that all names exist."""
    adapter_by_name = {adapter.name: adapter for adapter in source.adapters}
    selection = []
    for text in adapters:
        name, equals, folder = text.partition("=")
        if equals and not has_file(Path(folder) / CONFIG_FILE):
            message = f"there is no adapter in {folder or 'no folder'}."
            fix = did_you_mean_adapter(Path(folder), folder) or f"a folder with {CONFIG_FILE}"
            raise CheckpointError("generate.unknown-adapter", message, where=text, fix=fix)
        if equals and (name in adapter_by_name or name == BASE_NAME or not name):
            fix = f"OTHER={folder}, with a name of its own"
            raise ConfigError("generate.unknown-adapter", f"'{name}' names another adapter.", where=text, fix=fix)
        if equals:
            adapter_by_name[name] = AdapterSource(name=name, folder=Path(folder))
        elif name != BASE_NAME and name not in adapter_by_name:
            raise unknown_adapter(name, adapter_by_name)
        selection.append(name)
    names = tuple(dict.fromkeys(selection)) or source.asked or (BASE_NAME,)
    return replace(source, adapters=tuple(adapter_by_name.values()), asked=names)


def unknown_adapter(name: str, known: Sequence[str] | dict, where: str = "") -> ConfigError:
    """The error of a name that is no adapter's."""
    names = [*known, BASE_NAME]
    near = did_you_mean(name, names)
    return ConfigError(
        "generate.unknown-adapter",
        f"there is no adapter '{name}'" + (f"; {near}" if near else "."),
        where=where,
        fix=f"one of: {', '.join(names)}{'' if where else '; or NAME=FOLDER for a PEFT folder'}",
    )
