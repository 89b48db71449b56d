"""Finds the base model of a job: a folder, or a name on the hub."""

from __future__ import annotations

import os
from pathlib import Path

from lorafusion_jax.checkpoint.base_files import commit_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError, did_you_mean_path, first_few, install_line, quoted
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.readable import has_folder

MOST_MODELS = 6  # that an error offers
ALLOWED = ["*.json", "*.safetensors", "*.jinja"]  # files of a hub model


def base_directory(config: JobConfig) -> Path:
    """Finds the base model's directory.

    Raises:
        CheckpointError: it is neither a directory nor a hub name that can be resolved.
    """
    return find_base(Path(config.directory), config.base.model, config.base.revision)


def find_base(
    directory: Path,
    name: str,
    revision: str | None = None,
    *,
    fix: str = "base.model: a folder with config.json and *.safetensors, or org/name of a hub",
) -> Path:
    """Finds a base model: a path, relative to a directory, or a hub name; errors as of `base_directory`."""
    direct = directory / name
    if is_here(direct) and ((direct / "config.json").is_file() or not _models_in(direct)):
        return direct
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/"))
    if is_hub_name and not is_here(direct.parent):  # next to a folder "models", models/8B is a folder, too
        return _from_hub(name, revision, direct, fix)
    raise CheckpointError(
        "model.missing",
        f"there is no model directory {shortened(name)}.",
        where=str(direct.absolute()),
        fix=similar_folder(direct, name, fix),
    )


def similar_folder(direct: Path, typed: str, fix: str) -> str:
    """Names the folder that was probably meant, or before the fix the models in a folder that is none, or beside it."""
    has_direct = is_here(direct)
    folder, prefix = (direct, Path(typed)) if has_direct else (direct.parent, Path(typed).parent)
    models = [str(prefix / name) for name in _models_in(folder)]
    near = "" if has_direct else did_you_mean_path(Path(typed), _folders_in(folder))
    return near or (f"{first_few(models, MOST_MODELS)}; or " if models else "") + fix


def _models_in(folder: Path) -> list[str]:
    return [name for name in _folders_in(folder) if (folder / name / "config.json").is_file()]


def _folders_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    except (OSError, ValueError):
        return []


def base_identity(config: JobConfig) -> tuple[str, str | None]:
    """Returns a name of the base model that is valid from any folder: (hub name, commit) or (absolute path, None)."""
    if config.base.hub_id is not None:
        return config.base.hub_id, config.base.revision
    model = config.base.model
    if not is_here(Path(config.directory) / model):
        return model, config.base.revision
    path = (Path(config.directory) / model).absolute()
    return hub_snapshot(path) or (str(Path(os.path.normpath(path))), None)


def exported_base(config: JobConfig) -> tuple[str, str | None]:
    """Returns what an exported adapter calls its base: (hub name, commit) or (name of a folder, None).

    An adapter travels: a path is of no use on another machine, and tells of this one.
    """
    name, revision = base_identity(config)
    return (Path(name).name, None) if Path(name).is_absolute() else (name, revision)


def base_in_commands(config: JobConfig) -> str:
    """Returns the base as a command in the current folder names it, quoted: a hub name, or a path."""
    model = config.base.hub_id or config.base.model
    path, current = Path(os.path.abspath(Path(config.directory) / model)), Path.cwd()
    if config.base.hub_id is None and is_here(path):
        model = str(path.relative_to(current) if path.is_relative_to(current) else path)
    return quoted(model)


def is_here(path: Path) -> bool:
    """Whether a base's folder is here. Records name paths of other machines: what may not be looked at is not here."""
    try:
        return has_folder(path)
    except PermissionError:
        return False


def hub_snapshot(path: Path) -> tuple[str, str] | None:
    """Returns name and commit of a model in the hub's cache: …/models--org--name/snapshots/COMMIT."""
    *_, folder, snapshots, commit = ("", "", "", *path.parts)
    if snapshots != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/"), commit


def pin_base(config: JobConfig) -> JobConfig:
    """Sets `base.revision` to the hub model's commit, so that a resumed run loads the same weights."""
    commit = commit_of(base_directory(config))
    if commit is None or is_here(Path(config.directory) / config.base.model):
        return config
    return config.model_copy(update={"base": config.base.model_copy(update={"revision": commit})})


def _from_hub(name: str, revision: str | None, direct: Path, fix: str) -> Path:
    """Fetches a hub model. `direct` is the folder that the name would be."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            "model.missing",
            f"there is no model directory {name}, and hub names need the hf extra.",
            where=str(direct.absolute()),
            fix=f"{install_line('hf')}; or {fix}",
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=ALLOWED))
    except Exception as problem:  # the hub client raises many types; each means that there is no model
        raise CheckpointError(
            "model.hub",
            f"there is no model directory {name}, and no hub gave a model of this name.",
            where=str(direct.absolute()),
            why=_hub_cause(problem),
            fix=fix,
        ) from None


def _hub_cause(problem: BaseException) -> str:
    """The first line of the first cause: the client wraps a connection that failed in advice of several lines."""
    not_reached = isinstance(problem, OSError) and "LocalEntryNotFound" in type(problem).__name__
    first = problem
    while not_reached and (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    line = next(iter(str(first).strip().splitlines()), type(first).__name__)
    return f"the hub cannot be reached: {line}" if not_reached or isinstance(first, ConnectionError) else line
