"""Finds the base model of a job: a folder, or a name on the hub."""

from __future__ import annotations

import os
from pathlib import Path

from lorafusion_jax.checkpoint.base_files import commit_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.hf_config import shortened

ALLOWED = ["*.json", "*.safetensors", "*.jinja"]  # files of a hub model


def base_directory(config: JobConfig) -> Path:
    """Finds the base model's directory.

    Raises:
        CheckpointError: it is neither a directory nor a hub name that can be resolved.
    """
    direct = Path(config.directory) / config.base.model
    if _is_directory(direct):
        return direct
    if "/" in config.base.model and not config.base.model.startswith((".", "/")) and config.base.model.count("/") == 1:
        return _from_hub(config.base.model, config.base.revision)
    raise CheckpointError(
        "model.missing",
        f"there is no model directory {shortened(str(direct))}.",
        fix="base.model: a folder with config.json and *.safetensors, or org/name of a hub",
    )


def base_identity(config: JobConfig) -> tuple[str, str | None]:
    """Returns a name of the base model that is valid from any folder: (hub name, commit) or (absolute path, None)."""
    model = config.base.model
    if not _is_directory(Path(config.directory) / model):
        return model, config.base.revision
    path = (Path(config.directory) / model).absolute()
    return hub_snapshot(path) or (str(Path(os.path.normpath(path))), None)


def hub_snapshot(path: Path) -> tuple[str, str] | None:
    """Returns name and commit of a model in the hub's cache: …/models--org--name/snapshots/COMMIT."""
    *_, folder, snapshots, commit = ("", "", "", *path.parts)
    if snapshots != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/"), commit


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # not a valid file name
        return False


def pin_base(config: JobConfig) -> JobConfig:
    """Sets `base.revision` to the hub model's commit, so that a resumed run loads the same weights."""
    commit = commit_of(base_directory(config))
    if commit is None or _is_directory(Path(config.directory) / config.base.model):
        return config
    return config.model_copy(update={"base": config.base.model_copy(update={"revision": commit})})


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            "model.missing",
            f"'{name}' is not a directory, and hub names need the hf extra.",
            fix='pip install "lorafusion-jax[hf]"',
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=ALLOWED))
    except Exception as problem:  # the hub client raises many types; each means that there is no model
        raise CheckpointError("model.hub", f"the model '{name}' could not be fetched.", why=str(problem)) from None
