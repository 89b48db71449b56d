"""Uploads a folder to the hub, with the user's own login."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lorafusion_jax.errors import CheckpointError, ConfigError, install_line


def hub() -> Any:
    """Returns the hub's client.

    Raises:
        ConfigError: `export.no-hub`.
    """
    try:
        import huggingface_hub
    except ImportError:
        message = "--push needs the hf extra, which is not installed."
        raise ConfigError("export.no-hub", message, fix=f"{install_line('hf')}, then: hf auth login") from None
    return huggingface_hub.HfApi()


def upload(folder: Path, name: str) -> None:
    """Creates a private model on the hub, if it is new, and uploads a folder to it.

    Raises:
        CheckpointError: `export.push`; the folder stays.
    """
    client = hub()
    try:
        client.create_repo(name, private=True, exist_ok=True)
        client.upload_folder(repo_id=name, folder_path=str(folder))
    except Exception as problem:  # the client raises many types; each means that nothing or not all was uploaded
        raise CheckpointError(
            "export.push",
            f"{folder} was written, but not uploaded to {name}.",
            why=f"{type(problem).__name__}: {problem}",
            fix=f"hf auth login, then: hf upload {name} {folder}",
        ) from None
