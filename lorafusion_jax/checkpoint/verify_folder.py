"""Compares the files of a run folder, or of one folder with SHA256SUMS, with their digests. Changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax import digests
from lorafusion_jax.checkpoint.begun_folder import read_start
from lorafusion_jax.checkpoint.folder import CONFIG, TIMELINE, RunFolder, no_run
from lorafusion_jax.checkpoint.references import KEY as REFERENCES
from lorafusion_jax.checkpoint.references import reference_damage
from lorafusion_jax.checkpoint.requests import FOLDER as REQUESTS
from lorafusion_jax.checkpoint.run_lock import held_by
from lorafusion_jax.checkpoint.saved_states import checkpoint_damage, slots_of
from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few
from lorafusion_jax.log_file import damaged_lines, read_rows, without_crc
from lorafusion_jax.readable import PLAN, RECORD, check_regular, has_folder, read_bytes, read_text

LOGS = ("metrics.jsonl", "events.jsonl")
ROLLOUTS = "rollouts"
RUN_FILES = ("plan.json", "run.json", CONFIG)
SHOWN = 8  # line numbers that a finding names


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """Result for a file, or for a folder with digests.

    Attributes:
        name: path below the verified folder.
        files: number of compared files.
        damage: problems, each with its file.
        note: what could not be compared.
    """

    name: str
    files: int = 1
    damage: tuple[str, ...] = ()
    note: str = ""


def verify_folder(path: Path) -> list[FileCheck]:
    """Verifies a run folder, or a folder with digests such as an exported adapter.

    Raises:
        CheckpointError: `verify.nothing`, the folder is neither.
    """
    if digests.has_digests(path):
        return [_with_digests(path, ".")]
    if read_start(path) is not None and not (path / "plan.json").is_file():
        raise no_run(path, "plan.json")
    if not has_folder(path) or not any((path / name).exists() for name in (*RUN_FILES, "state", "adapters")):
        raise CheckpointError(
            "verify.nothing",
            f"{path} is not a run folder and has no {digests.FILE}.",
            why="folders of other programs have no digests",
            fix="lorafusion verify RUN, or a folder that lorafusion export wrote",
        )
    folder = RunFolder(path)
    files = (
        *_run_files(folder),
        *_logs(folder),
        *_states(path),
        *_adapters(path),
        *_references(folder),
        *_rollouts(path),
    )
    return [*files, *_other_files(path)]


def _run_files(folder: RunFolder) -> Iterator[FileCheck]:
    missing = [name for name in RUN_FILES if not (folder.path / name).is_file()]
    yield from (FileCheck(name=name, damage=(f"{folder.path / name}: it is missing",)) for name in missing)
    if "plan.json" not in missing:
        yield _check_file("plan.json", lambda: _plan_damage(folder))
    if "run.json" not in missing:
        yield _check_file("run.json", folder.record_damage)
    for name in (CONFIG, TIMELINE):
        if (folder.path / name).is_file():
            yield _check_digest(folder, name)


def _check_file(name: str, damage) -> FileCheck:
    try:
        why = damage()
    except LoraFusionError as problem:
        why = problem.why or problem.what
    return FileCheck(name=name, damage=(f"{name}: {why}",) if why else ())


def _plan_damage(folder: RunFolder) -> str | None:
    plan = folder.read_plan()
    same = read_bytes(folder.plan_file, PLAN) == plan.to_json().encode()
    return None if same else "its bytes changed since it was written, but its plan did not"


def _check_digest(folder: RunFolder, name: str) -> FileCheck:
    try:
        digest = folder.read_record().get("files", {}).get(name)
        check_regular(folder.path / name, RECORD)
        actual = digests.digest_of(folder.path / name)
    except LoraFusionError as problem:
        return FileCheck(name=name, files=0, note=f"not compared: {problem.what}")
    except OSError as problem:
        return FileCheck(name=name, damage=(f"{name}: {problem.strerror}",))
    if digest is None:
        return FileCheck(name=name, files=0, note="not compared: run.json has no digest of it")
    return FileCheck(name=name, damage=() if actual == digest else (f"{name}: its content differs from its digest",))


def _logs(folder: RunFolder) -> Iterator[FileCheck]:
    for name in LOGS:
        if not (folder.path / name).is_file():
            if os.path.lexists(folder.path / name):
                yield FileCheck(name=name, damage=(f"{name}: it is not a file",))
            continue
        short = _missing_rows(folder) if name == "metrics.jsonl" else ()
        lines = damaged_lines(folder.path / name)
        damage = (f"{name}: damaged in line {first_few(lines, SHOWN)}",) if lines else ()
        yield FileCheck(name=name, damage=(*damage, *short))


def _missing_rows(folder: RunFolder) -> tuple[str, ...]:
    """Reports metrics.jsonl if it is shorter than when the last checkpoint was written."""
    last = [row for row in read_rows(folder.path / "events.jsonl") if row["kind"] in ("started", "saved")][-1:]
    before = last[0].get("metrics_bytes", 0) if last else 0
    size = (folder.path / "metrics.jsonl").stat().st_size
    return (f"metrics.jsonl: rows are missing at its end, it has {size} of {before} bytes",) if size < before else ()


def _states(path: Path) -> Iterator[FileCheck]:
    for slot in slots_of(path / "state"):
        folder = path / "state" / str(slot)
        yield _with_digests(folder, f"state/{slot}", [str(damage) for damage in checkpoint_damage(folder)])


def _adapters(path: Path) -> Iterator[FileCheck]:
    for folder in sorted(path.glob("adapters/*/step-*")):
        yield _with_digests(folder, folder.relative_to(path).as_posix())
    for link in sorted(path.glob("adapters/*/latest")):
        if not link.is_dir():
            name = link.relative_to(path).as_posix()
            yield FileCheck(name=name, damage=(f"{name}: it points to no folder",))


def _references(folder: RunFolder) -> Iterator[FileCheck]:
    try:
        record = folder.read_record()
    except LoraFusionError:  # `_run_files` says so
        return
    if count := len(record.get(REFERENCES, {})):
        yield FileCheck(name=REFERENCES, files=count, damage=tuple(reference_damage(folder.path, record)))


def _rollouts(path: Path) -> Iterator[FileCheck]:
    """Yields what was drawn: a run that is resumed trains on it."""
    damage, files = [], sorted(path.glob(f"{ROLLOUTS}/*.json"))
    for file in files:
        try:
            json.loads(without_crc(read_text(file, RECORD)))
        except (OSError, ValueError) as problem:
            damage.append(f"{ROLLOUTS}/{file.name}: {problem}")
    if files:
        yield FileCheck(name=ROLLOUTS, files=len(files), damage=tuple(damage))


def _with_digests(folder: Path, name: str, damage: list[str] | None = None) -> FileCheck:
    if not digests.has_digests(folder):
        return FileCheck(name=name, files=0, damage=tuple(damage or [f"{name}/{digests.FILE}: it is missing"]))
    if damage is None:
        damage = [str(problem) for problem in digests.find_damage(folder)]
    count = sum(1 for file in folder.rglob("*") if file.is_file())
    return FileCheck(name=name, files=count, damage=tuple(damage))


def _other_files(path: Path) -> Iterator[FileCheck]:
    """Yields files that no result depends on, and temporary files of killed processes."""
    is_written = bool(held_by(path).get("alive"))
    half = "the run is writing it" if is_written else "left by a killed process: resume removes it"
    names = {*RUN_FILES, *LOGS, TIMELINE, REQUESTS, REFERENCES, ROLLOUTS, "state", "adapters"}
    for child in sorted(path.iterdir()):
        if child.name not in names:
            note = half if child.name.startswith(".") else "no result needs it"
            yield FileCheck(name=child.name, files=0, note=f"not compared: {note}")
    for pattern in ("state", "adapters/*"):
        for leftover in sorted(path.glob(f"{pattern}/.*")):
            yield FileCheck(name=leftover.relative_to(path).as_posix(), files=0, note=f"not compared: {half}")
