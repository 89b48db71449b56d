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
from lorafusion_jax.checkpoint.base_model import base_directory, base_identity, hub_snapshot, is_directory
from lorafusion_jax.config.peft_config import CONFIG_FILE, read_config
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.readable import RECORD, read_text

_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_start_bases(config: JobConfig) -> list[LoraFusionError]:
    """Finds adapters of `lora.init_from` that were trained on another base model (`peft.other-base`)."""
    errors: list[LoraFusionError] = []
    now: dict[str, dict[str, str]] = {}
    for name, folder in _starts(config):
        try:
            if _digests(folder) and not now:
                now = base_digests(base_directory(config))
            why = _contradiction(folder, config, now, same_base=config.adapter(name).lora.same_base)
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
                    fix="use that base model; if it is the same one under another name: lora.same_base: true",
                )
            )
    return errors


def unproven_bases(config: JobConfig) -> list[str]:
    """Returns notes on adapters of `lora.init_from` whose base model can only be compared by shapes."""
    notes = []
    for name, folder in _starts(config):
        try:
            unproven = not _digests(folder) and not _comparable(folder, config)
            recorded = _recorded_base(folder)[0]
        except LoraFusionError:
            continue
        if unproven:
            made_for = f"for '{recorded}'" if recorded else "for a base model that its folder does not name"
            notes.append(
                f"{name}: lora.init_from was made {made_for}. "
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
    theirs, revision = _recorded_base(folder)
    ours, commit = base_identity(config)
    both_are_folders = is_directory(Path(theirs)) and is_directory(Path(ours))
    if (same_base and not both_are_folders) or _comparable(folder, config) is not False:
        return None
    at = f" at {revision} and at {commit}" if revision and commit and theirs == ours else ""
    return f"it was made for '{theirs}', this job has '{ours}'{at}"


def _comparable(folder: Path, config: JobConfig) -> bool | None:
    """Whether names or files show the same base model (True) or another one (False); None: unknown."""
    theirs, revision = _recorded_base(folder)
    ours, commit = base_identity(config)
    theirs_here, ours_here = Path(theirs).is_absolute() and is_directory(Path(theirs)), is_directory(Path(ours))
    if theirs_here and ours_here:
        same = Path(theirs).samefile(ours)
        return same or base_digests(Path(theirs)) == base_digests(Path(ours))
    if not _HUB.fullmatch(theirs) or not ours:
        return None
    if ours_here:  # a hub name and a folder: only different names are evidence
        return None if Path(ours).name.casefold() == theirs.rsplit("/", 1)[-1].casefold() else False
    if theirs.casefold() != ours.casefold():
        return False
    known = revision and commit and _COMMIT.fullmatch(revision) and _COMMIT.fullmatch(commit)
    return revision == commit if known else True


def _recorded_base(folder: Path) -> tuple[str, str | None]:
    """Returns name or path of the base model that a folder names, and its revision."""
    raw = read_config(folder)
    theirs, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    theirs = theirs if isinstance(theirs, str) and "\0" not in theirs else ""
    return hub_snapshot(Path(theirs)) or (theirs, revision if isinstance(revision, str) else None)


def _digests(folder: Path) -> dict[str, dict[str, str]]:
    """Returns the digests of the base model, if the folder was written by one of our runs."""
    try:
        digests = json.loads(read_text(folder / "run.json", RECORD)).get("base_files")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    good = isinstance(digests, dict) and all(isinstance(files, dict) for files in digests.values())
    return digests if good else {}
