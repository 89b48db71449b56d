"""run.json: what a run started with, and a digest by which edits of the file are found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.readable import RECORD, read_bytes, read_text

SEAL = "digest"  # key of the digest of all other entries
TYPES = {
    "plan": str,
    "data": dict,
    "eval": dict,
    "compared_by": dict,
    "moves": list,
    "files": dict,
    "config": dict,
    "base_files": dict,
    "warm_starts": dict,
    "references": dict,
    "versions": dict,
}
REQUIRED = ("plan", "data", "eval", "config", "base_files")


def read(file: Path) -> dict:
    """Reads the record; see `find_damage` for its digest.

    Raises:
        CheckpointError: `run.record`, its content has the wrong form.
    """
    try:
        record = json.loads(read_text(file, RECORD))
        if (why := _wrong_types(record)) is not None:
            raise ValueError(why)
    except (OSError, ValueError, RecursionError) as problem:
        raise damaged(file, str(problem)) from None
    return {key: value for key, value in record.items() if key != SEAL}


def to_text(record: dict) -> str:
    """Returns the text of the file, with the digest of its other entries."""
    plain = json.dumps(record, indent=1)
    return json.dumps(record | {SEAL: hashlib.sha256(plain.encode()).hexdigest()}, indent=1)


def find_damage(file: Path) -> str | None:
    """Returns what is wrong with the bytes of the file."""
    record = read(file)
    same = read_bytes(file, RECORD) == to_text(record).encode()
    return None if same else "its content differs from the digest in it"


def with_file_digest(record: dict, name: str, text: str) -> dict:
    """Returns the record with the digest of a file of the run folder."""
    return record | {"files": record.get("files", {}) | {name: text_digest(text)}}


def file_digest(record: dict, name: str) -> str | None:
    """Returns the digest that `with_file_digest` has written."""
    digest = record.get("files", {}).get(name)
    return digest if isinstance(digest, str) else None


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def damaged(file: Path, why: str) -> CheckpointError:
    """Returns the error `run.record`."""
    return CheckpointError(
        "run.record",
        f"{file} is damaged.",
        why=why,
        fix="restore it from a copy, or choose another --out for a new run, which can start from the exported "
        "adapters (lora.init_from)",
    )


def _wrong_types(record: object) -> str | None:
    """Returns which entries are missing or have the wrong type; None if all are right."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    if missing := [key for key in REQUIRED if key not in record]:
        return f"it lacks {', '.join(missing)}"
    bad = [key for key, kind in TYPES.items() if key in record and not isinstance(record[key], kind)]
    if not bad and not all(isinstance(move, dict) and "plan" in move for move in record.get("moves", ())):
        bad = ["moves"]
    return f"{', '.join(bad)}: not of the type that a run writes" if bad else None
