"""Checks that the adapter of a PEFT folder was trained on the base model of a job.

It compares digests if the folder has them, as folders of our runs do. Otherwise it compares hub names and commits, or
the files of the two base folders if both exist. If none of these is known, a note says so. Shapes are compared in any
case.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from lorafusion_jax.checkpoint.base_files import base_digests
from lorafusion_jax.checkpoint.base_model import base_directory, base_identity, hub_snapshot, is_here
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.peft.read_config import CONFIG_FILE, read_config
from lorafusion_jax.readable import RECORD, read_text

_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_OTHER_NAME = "if it is the same one under another name: lora.same_base: true"
_STORED_OTHERWISE = f"if this one has the same weights, stored otherwise: name it in the folder's {CONFIG_FILE}"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_start_bases(config: JobConfig) -> list[LoraFusionError]:
    """Finds adapters of `lora.init_from` that were trained on another base model (`peft.other-base`)."""
    errors: list[LoraFusionError] = []
    digests: dict[str, dict[str, str]] = {}
    for name, folder in _starts(config):
        try:
            if _digests(folder) and not digests:
                digests = base_digests(base_directory(config))
            same_base = config.adapter(name).lora.same_base
            why = _contradiction(folder, config, digests, same_base=same_base)
        except LoraFusionError:  # no such base or folder: reading them reports that
            continue
        if why:
            errors.append(
                CheckpointError(
                    "peft.other-base",
                    f"{name}: the adapter was made for another base model.",
                    where=f"adapters.{name}.lora.init_from={config.adapter(name).lora.init_from}, "
                    f"{folder / CONFIG_FILE}",
                    why=why,
                    fix="use that base model; " + (_STORED_OTHERWISE if same_base else _OTHER_NAME),
                )
            )
    return errors


def unproven_bases(config: JobConfig) -> list[str]:
    """Returns notes on adapters of `lora.init_from` whose base model can only be compared by shapes."""
    notes = []
    for name, folder in _starts(config):
        try:
            unproven = not _digests(folder) and not _comparable(folder, config)
            base_name = _recorded_base(folder)[0]
        except LoraFusionError:
            continue
        if unproven:
            for_base = f"for '{base_name}'" if base_name else "for a base model that its folder does not name"
            notes.append(
                f"{name}: lora.init_from was made {for_base}. "
                f"All shapes fit, but it is unknown whether that is '{config.base.model}'"
            )
    return notes


def _starts(config: JobConfig) -> list[tuple[str, Path]]:
    return [
        (adapter.name, Path(config.directory) / adapter.lora.init_from)
        for adapter in config.adapters
        if adapter.lora.init_from is not None
    ]


def _contradiction(folder: Path, config: JobConfig, now: dict[str, dict[str, str]], *, same_base: bool) -> str | None:
    """Returns why the base model differs; None if nothing shows that it does.

    Args:
        same_base: another name shows nothing.
    """
    before = _digests(folder)
    if common := before.keys() & now.keys():
        changed = sorted(
            {name for kind in common for name, digest in now[kind].items() if before[kind].get(name) != digest}
        )
        return f"{', '.join(changed[:4])} have other content than in its run" if changed else None
    adapter_base, revision = _recorded_base(folder)
    job_base, commit = base_identity(config)
    both_are_folders = is_here(Path(adapter_base)) and is_here(Path(job_base))
    if (same_base and not both_are_folders) or _comparable(folder, config) is not False:
        return None
    at = f" at {revision} and at {commit}" if revision and commit and adapter_base == job_base else ""
    return f"it was made for '{adapter_base}', this job has '{job_base}'{at}"


def _comparable(folder: Path, config: JobConfig) -> bool | None:
    """Whether names or files show the same base model (True) or another one (False); None: unknown."""
    adapter_base, revision = _recorded_base(folder)
    job_base, commit = base_identity(config)
    adapter_is_folder, job_is_folder = (
        Path(adapter_base).is_absolute() and is_here(Path(adapter_base)),
        is_here(Path(job_base)),
    )
    if adapter_is_folder and job_is_folder:
        same = Path(adapter_base).samefile(job_base)
        return same or base_digests(Path(adapter_base)) == base_digests(Path(job_base))
    if not _HUB.fullmatch(adapter_base) or not job_base:
        return None
    if job_is_folder:  # a hub name and a folder: only different names are evidence
        return None if Path(job_base).name.casefold() == adapter_base.rsplit("/", 1)[-1].casefold() else False
    if adapter_base.casefold() != job_base.casefold():
        return False
    are_commits = revision and commit and _COMMIT.fullmatch(revision) and _COMMIT.fullmatch(commit)
    return revision == commit if are_commits else True


def _recorded_base(folder: Path) -> tuple[str, str | None]:
    """Returns name or path of the base model that a folder names, and its revision."""
    raw = read_config(folder)
    adapter_base, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    adapter_base = adapter_base if isinstance(adapter_base, str) and "\0" not in adapter_base else ""
    return hub_snapshot(Path(adapter_base)) or (adapter_base, revision if isinstance(revision, str) else None)


def _digests(folder: Path) -> dict[str, dict[str, str]]:
    """Returns the digests of the base model, if the folder was written by one of our runs."""
    try:
        digests = json.loads(read_text(folder / "run.json", RECORD)).get("base_files")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    good = isinstance(digests, dict) and all(isinstance(files, dict) for files in digests.values())
    return digests if good else {}
