"""Files of a job's base model, where they are at hand: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.families.model import ModelConfig


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
