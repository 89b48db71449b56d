"""Changes config.yaml and plan.json of a run in one step, which is the rename of run.json.

The new files are written first, beside the old ones, under names with their digests. Then run.json is replaced, which
names these digests: the change is there, and whole. At last each new file takes its place. Whoever reads in between, or
after a kill, takes the file that run.json names, wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lorafusion_jax.files import replace_text, sync

NEXT = ".next"  # suffix of the hidden names


def current_file(folder: Path, name: str, digest: str) -> Path:
    """Returns where the file with this digest is; `folder / name` if nothing is left to do."""
    prepared = _prepared(folder, name, digest)
    return prepared if prepared.is_file() else folder / name


def change_files(
    folder: Path, texts: Mapping[str, str], digests: Mapping[str, str], commit: Callable[[], None]
) -> None:
    """Replaces files of a run together.

    Args:
        texts: name → new content.
        digests: name → digest, as run.json names it after `commit`.
        commit: replaces run.json.
    """
    for name, text in texts.items():
        replace_text(_prepared(folder, name, digests[name]), text)
    sync(folder)  # before run.json names them
    commit()
    complete_change(folder, digests)


def complete_change(folder: Path, digests: Mapping[str, str]) -> None:
    """Completes a change that was committed, and removes what was prepared for one that was not.

    Args:
        digests: name → digest, as run.json names it.
    """
    for name, digest in digests.items():
        if (prepared := current_file(folder, name, digest)) != folder / name:
            prepared.replace(folder / name)
    for leftover in folder.glob(f".*{NEXT}"):
        leftover.unlink()


def _prepared(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}.{digest}{NEXT}"
