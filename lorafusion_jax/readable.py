"""Reads files that may be anything: a pipe, a device, a folder, or far larger than what they should be.

Kind and size are checked before the first byte is read, so no reader waits for a pipe or fills the memory. Limits are
generous; they are here, in one place, so that each reader says the same.
"""

from __future__ import annotations

import codecs
import errno
import os
import shlex
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path, PurePath

MB, GB = 10**6, 10**9
SETTINGS = 32 * MB  # job files, configurations of models and adapters, requests, costs
TEMPLATE = MB // 4  # chat templates; the longest known have 20 kB
TOKENIZER = 1 * GB
RECORD = 1 * GB  # run.json, indexes and digests
PLAN = 16 * GB  # a million slots take some 100 MB
LOG = 64 * GB  # metrics and events, which are read line by line
DATA = 64 * GB
LOOK = 4096  # bytes
UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}  # suffix of a file → command that writes what is in it

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class NotReadableError(OSError):
    """A path is not a file, or the file is too large. `strerror` says why.

    Attributes:
        encoding: of a text that is not in UTF-8, if its beginning shows it.
    """

    encoding: str | None = None

    def __str__(self) -> str:
        return str(self.strerror)


def has_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path from outside names a file. No file has a name that is too long, or that holds a zero.

    >>> has_file("x" * 5000)
    False
    """
    return _names_one(Path(path).is_file)


def has_folder(path: str | os.PathLike[str]) -> bool:
    """`has_file` for a folder."""
    return _names_one(Path(path).is_dir)


def _names_one(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except ValueError:  # it holds a zero
        return False
    except OSError as problem:
        if problem.errno != errno.ENAMETOOLONG:
            raise
        return False


def open_regular(path: str | os.PathLike[str], most: int | None = None, *, follow: bool = True) -> BufferedReader:
    """Opens a regular file for reading.

    Args:
        most: largest size in bytes (None: any).
        follow: follow a link to a file; otherwise a link is an error.

    Raises:
        NotReadableError: it is a pipe, a device or a socket, or too large.
        FileNotFoundError: it is not there, or no file has such a name, see `has_file`.
        OSError: as `open`.
    """
    more = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)  # a pipe without a writer would block

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | more)
        try:
            check_stat(os.fstat(handle), path, most)
        except OSError:
            os.close(handle)
            raise
        return handle

    try:
        return open(path, "rb", opener=opener)
    except (OSError, ValueError) as problem:  # ValueError: it holds a zero, or half of a character
        if isinstance(problem, OSError) and problem.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from None


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Reads a regular file of at most that many bytes; see `open_regular`.

    >>> read_bytes("/dev/zero", SETTINGS)
    Traceback (most recent call last):
    lorafusion_jax.readable.NotReadableError: it is a device, not a file
    """
    with open_regular(path, most) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """Reads a regular text file, with line ends as they are on every system; see `read_bytes`.

    A byte order mark, which editors and spreadsheets write before UTF-8, is no part of the text.

    Raises:
        UnicodeDecodeError: it is no text in UTF-8.
    """
    with open_text(path, most) as file:
        return file.read().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def open_text(path: str | os.PathLike[str], most: int) -> BufferedReader:
    """`open_regular` for text: looks at the beginning first, because gigabytes of zeros are no text."""
    file = open_regular(path, most)
    start = file.peek(LOOK)[:LOOK]
    if b"\0" in start:
        file.close()
        encoding = utf_16(start)
        why = f"it is text in {encoding.upper()}" if encoding else "it holds zero bytes, so it is no text in UTF-8"
        problem = NotReadableError(errno.EINVAL, why, str(path))
        problem.encoding = encoding
        raise problem
    return file


def utf_16(start: bytes) -> str | None:
    """The encoding of a text in UTF-16, which begins with a sign of its own or, as every format does, with ASCII.

    >>> utf_16("base:".encode("utf-16-le")), utf_16(b"base:")
    ('utf-16le', None)
    """
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = [byte == 0 for byte in start[:4]]
    if zeros == [False, True, False, True]:
        return "utf-16le"
    return "utf-16be" if zeros == [True, False, True, False] else None


def to_utf8(name: str, encoding: str) -> str:
    """The command that converts a file.

    >>> to_utf8("data/law.jsonl", "latin1")
    'iconv -f latin1 -t utf-8 data/law.jsonl > data/law-utf8.jsonl'
    >>> to_utf8("my.home/my key", "utf-16")
    "iconv -f utf-16 -t utf-8 'my.home/my key' > 'my.home/my key-utf8'"
    >>> to_utf8("data/law.jsonl.gz", "latin1")
    'gzip -dc data/law.jsonl.gz | iconv -f latin1 -t utf-8 > data/law-utf8.jsonl'
    """
    path, unpack = PurePath(name), UNPACK.get(PurePath(name).suffix)
    path = path.with_suffix("") if unpack else path
    to = shlex.quote(str(path.with_stem(f"{path.stem}-utf8")))
    if unpack:
        return f"{unpack} {shlex.quote(name)} | iconv -f {encoding} -t utf-8 > {to}"
    return f"iconv -f {encoding} -t utf-8 {shlex.quote(name)} > {to}"


def check_regular(path: Path, most: int | None = None) -> None:
    """Checks a file that a library will open, which may not say why it cannot; see `open_regular`."""
    open_regular(path, most).close()


def check_stat(status: os.stat_result, path: str | os.PathLike[str], most: int | None = None) -> None:
    """Checks the kind and size of a file; see `open_regular`."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise NotReadableError(errno.EINVAL, f"it is {_KINDS.get(kind, 'special')}, not a file", str(path))
    if most is not None and status.st_size > most:
        why = f"it has {_size(status.st_size)}, and such a file has {_size(most)} at most"
        raise NotReadableError(errno.EFBIG, why, str(path))


def _size(count: int) -> str:
    return f"{count / GB:.3g} GB" if count >= GB else f"{count / MB:.3g} MB"
