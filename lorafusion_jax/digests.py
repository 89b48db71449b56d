"""SHA256SUMS: the digests of a folder's files, written with the folder and compared on every read.

The format is that of sha256sum, so `sha256sum -c SHA256SUMS` checks a folder without this package. The last line is a
comment with the digest of the lines above it.

Large files are sampled instead: enough to notice another, a truncated or an exchanged file, in little time. Every
stretch of `SPACING` bytes of an array has one block of `BLOCK` bytes, so every array has at least one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.files import replace_text
from lorafusion_jax.readable import RECORD, has_file, open_regular, read_bytes

BLOCK, SPACING = 16 * 1024, 64 * 10**6  # bytes of a sample; bytes of an array per sample
FILE = "SHA256SUMS"
THREADS = 8  # hashlib releases the GIL
_SEAL = "# sha256 of the lines above: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file that differs from what was written."""

    file: Path
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


def write_digests(folder: Path) -> None:
    """Writes the digests of all files below a folder.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "note.txt").write_text("good")
    >>> write_digests(folder); find_damage(folder)
    []
    >>> _ = (folder / "note.txt").write_text("gone")
    >>> [damage.why for damage in find_damage(folder)]
    ['its content differs from its digest in SHA256SUMS']
    """
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    replace_text(folder / FILE, _text(digests_of(folder, [name for name in names if name != FILE])))


def has_digests(folder: Path) -> bool:
    return has_file(folder / FILE)


def find_damage(folder: Path, names: Sequence[str] | None = None) -> list[Damage]:
    """Compares files with their digests.

    Args:
        names: files to check, which SHA256SUMS must list (None: all that it lists).

    Returns:
        One entry for each file that is missing, unreadable, changed or not listed. If SHA256SUMS itself is damaged, one
        entry for it.
    """
    try:
        digests = read_digests(folder)
    except (OSError, ValueError) as problem:
        return [Damage(file=folder / FILE, why=_reason(problem))]
    checked_names = sorted(digests) if names is None else names
    with ThreadPoolExecutor(THREADS) as pool:
        differences = pool.map(lambda name: _find_difference(folder / name, digests.get(name)), checked_names)
        return [damage for damage in differences if damage is not None]


def is_intact(folder: Path) -> bool:
    """Whether a folder exists and its files match their digests, if it has any."""
    return folder.is_dir() and not (has_digests(folder) and find_damage(folder))


def refuse_damage(code: str, damage: Sequence[Damage], fix: str) -> None:
    """Raises an error that names the damaged files, if any.

    Raises:
        CheckpointError: `code`.
    """
    if damage:
        names = ", ".join(problem.file.name for problem in damage)
        raise CheckpointError(
            code,
            f"{names} {'is' if len(damage) == 1 else 'are'} damaged.",
            where=", ".join(str(problem.file) for problem in damage),
            why=damage[0].why,
            fix=fix,
        )


def read_digests(folder: Path) -> dict[str, str]:
    """Reads SHA256SUMS: file → digest.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    text = read_bytes(folder / FILE, RECORD).decode()
    rows = [line.split("  ", 1) for line in text.splitlines() if not line.startswith(_SEAL)]
    if any(len(row) != 2 for row in rows) or text != _text({name: digest for digest, name in rows}):
        raise ValueError("its own digest does not match")
    return {name: digest for digest, name in rows}


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns file → SHA-256 of its bytes."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest_of(folder / name), names), strict=True))


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file. Does not follow links."""
    with open_regular(file, follow=False) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _find_difference(file: Path, digest: str | None) -> Damage | None:
    if digest is None:
        return Damage(file=file, why=f"{FILE} does not list it")
    try:
        same = digest_of(file) == digest
    except OSError as problem:
        return Damage(file=file, why=_reason(problem))
    return None if same else Damage(file=file, why=f"its content differs from its digest in {FILE}")


def _text(digests: dict[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return f"{lines}{_SEAL}{hashlib.sha256(lines.encode()).hexdigest()}\n"


def _reason(problem: Exception) -> str:
    if isinstance(problem, FileNotFoundError):
        return "it is missing"
    if isinstance(problem, UnicodeDecodeError):
        return "it is not text"
    return getattr(problem, "strerror", None) or str(problem)


def sample_offsets(name: str, start: int, stop: int) -> Iterator[int]:
    """Yields the offsets of the samples of an array: pseudorandom within each stretch, the same in every process.

    >>> list(sample_offsets("short", 0, BLOCK)), len(list(sample_offsets("long", 0, 3 * SPACING)))
    ([0], 3)

    Args:
        name: of the array; draws the offsets.
        start, stop: its byte range.
    """
    for first in range(start, stop, SPACING):
        free = max(min(first + SPACING, stop) - first - BLOCK, 0)
        draw = int.from_bytes(hashlib.sha256(f"{name} {first}".encode()).digest()[:8], "little")
        yield first + draw % (free + 1)
