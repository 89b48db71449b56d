"""Log files of a run folder: one JSON object per line, with a CRC to detect damaged lines."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from lorafusion_jax.readable import LOG, open_regular, open_text

LONGEST_LINE = 64_000_000  # bytes; a longer one is damaged
CRC = b', "crc": "'  # follows the row without its CRC; then 8 hex digits and '"}'


def encode_row(row: dict[str, Any]) -> bytes:
    """Encodes a row as one line.

    >>> encode_row({"kind": "saved", "slot": 3})
    b'{"kind": "saved", "slot": 3, "crc": "37fa5b2f"}\\n'
    """
    plain = json.dumps(row, allow_nan=False).encode()[:-1]
    return plain + CRC + b'%08x"}\n' % zlib.crc32(plain)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is damaged or truncated. A line without a CRC is parsed as it is.

    >>> parse_row(b'{"kind": "saved", "slot": 3, "crc": "37fa5b2f"}')
    {'kind': 'saved', 'slot': 3}
    >>> parse_row(b'{"kind": "saved", "slot": 2, "crc": "37fa5b2f"}')
    """
    if not is_unchanged(line):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or not _is_whole(row.get("slot")):
        return None
    of_adapter = row["kind"] in ("step", "eval")  # rows of one adapter
    if of_adapter and not (isinstance(row.get("adapter"), str) and _is_whole(row.get("step"))):
        return None
    row.pop("crc", None)
    return row if isinstance(row.get("time", 0), int | float) else None


def with_crc(text: str) -> str:
    """Adds a line with the CRC of a text.

    >>> without_crc(with_crc("[1, 2]"))
    '[1, 2]'
    """
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


def without_crc(text: str) -> str:
    """Returns a text without the line of its CRC; one of an earlier version has none.

    Raises:
        ValueError: the CRC is that of another text.
    """
    plain, mark, digest = text.rstrip("\n").rpartition("\n")
    if mark and digest != f"{zlib.crc32(plain.encode()):08x}":
        raise ValueError("its last line is the CRC of another content")
    return plain if mark else text


def is_unchanged(line: bytes) -> bool:
    """Whether a line matches its CRC or has none."""
    plain, mark, digest = line.rpartition(CRC)
    return not mark or digest.rstrip(b"\n") == b'%08x"}' % zlib.crc32(plain)


def read_rows(path: Path) -> list[dict]:
    """Reads the valid rows of a log; damaged and truncated lines are skipped."""
    return [row for line in _lines(path) if (row := parse_row(line)) is not None]


def damaged_lines(path: Path) -> list[int]:
    """Numbers of the damaged lines: also those without a CRC, and a truncated last line."""
    return [
        number
        for number, line in enumerate(_lines(path), 1)
        if parse_row(line) is None or not line.endswith(b"\n") or CRC not in line
    ]


def open_log(path: Path) -> BufferedReader:
    """Opens a log for reading.

    Raises:
        NotReadableError: it is a pipe, a device or a socket, or begins with zeros that are no line.
        OSError: as `open`.
    """
    large = path.stat().st_size > LONGEST_LINE
    return open_text(path, LOG) if large else open_regular(path, LOG)


def split_lines(content: bytes) -> list[bytes]:
    """Splits at line feeds only and keeps them."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    return lines[:-1] + ([lines[-1][:-1]] if lines[-1] != b"\n" else [])


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with open_log(path) as file:
            while line := file.readline(LONGEST_LINE):
                yield line


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
