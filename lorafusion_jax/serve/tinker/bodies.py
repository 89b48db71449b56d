"""Bodies of requests, received into files and unpacked on the way: at most 32 MiB packed and 64 MiB unpacked."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from lorafusion_jax.files import make_folder
from lorafusion_jax.serve.api.problems import ApiError

LARGEST_PACKED, LARGEST = 32 << 20, 64 << 20
RECEIVING, RECEIVING_OF_OWNER = 1 << 30, 256 << 20  # bytes of bodies that arrive at once
BODY_S = 60.0  # for one to arrive
SLICE = 256  # packed bytes that are unpacked at once: four of them can stand for 128 KiB
WINDOW = 8 << 20  # memory of unpacking
START = 4096  # bytes that are remembered of a body's beginning: it says whose it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body in a file.

    Attributes:
        start: its first bytes, unpacked.
        problem: why it cannot be used; then there is no file.
    """

    path: Path
    start: bytes
    sha256: str = ""
    size: int = 0
    problem: ApiError | None = None


class Receiver:
    """Receives bodies. All runs on the event loop of the server, but for unpacking and the disk."""

    def __init__(self) -> None:
        self._arriving: Counter[str] = Counter()  # bytes by owner

    async def receive(self, request: Request, owner: str, part: Path) -> Body:
        """Writes a body to a new file, on the disk when this returns.

        Raises:
            ApiError: 408, 415, 429 or 507; there is no file then.
        """
        writer = await run_in_threadpool(_Writer, part, request.headers.get("content-encoding", "identity"))
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for data in request.stream():
                    self._take(owner, len(data))
                    size += len(data)
                    await run_in_threadpool(writer.write, data)
                    if size > LARGEST_PACKED:
                        raise _too_large(f"as it is sent, it has at most {LARGEST_PACKED} bytes.")
            return await run_in_threadpool(writer.finish)
        except BodyError as problem:
            return Body(path=part, start=bytes(writer.start), problem=problem)
        except TimeoutError:
            message = f"a body takes at most {BODY_S:g} s."
            raise ApiError(408, "api.slow", message, fix="send it faster, or in smaller requests") from None
        finally:
            writer.close()
            self._arriving[owner] -= size
            if not self._arriving[owner]:
                del self._arriving[owner]

    def _take(self, owner: str, count: int) -> None:
        if self._arriving[owner] + count > RECEIVING_OF_OWNER or self._arriving.total() + count > RECEIVING:
            message = f"bodies of one owner that arrive have at most {RECEIVING_OF_OWNER} bytes, and all {RECEIVING}."
            raise ApiError(429, "api.bodies", message, fix="send fewer at once", headers={"Retry-After": "1"})
        self._arriving[owner] += count


class BodyError(ApiError):
    """A body that is too large, or cannot be read."""


class _Writer:
    """A file that is written and unpacked, with its digest.

    Raises:
        ApiError: 415, the encoding is not known; 507, the disk is full.
        BodyError: 413 or 422.
    """

    def __init__(self, part: Path, encoding: str):
        self._packed = _unpacker(encoding)
        with _answering_disk():
            make_folder(part.parent)
            self._part, self._file = part, part.open("wb")
        self._digest, self._size, self._is_whole, self.start = hashlib.sha256(), 0, False, bytearray()

    def write(self, data: bytes) -> None:
        if self._packed is None:
            self._add(data)
            return
        for at in range(0, len(data), SLICE):
            self._add(_unpack(self._packed, data[at : at + SLICE]))

    def _add(self, data: bytes) -> None:
        self._size += len(data)
        if len(self.start) < START:
            self.start += data[:START]
        if self._size > LARGEST:
            raise _too_large(f"unpacked, it has at most {LARGEST} bytes.")
        self._digest.update(data)
        with _answering_disk():
            self._file.write(data)

    def finish(self) -> Body:
        if self._packed is not None and not self._packed.eof:
            raise _unreadable("the packed body ends before its end.")
        with _answering_disk():
            self._file.flush()
            os.fsync(self._file.fileno())
        self._is_whole = True
        return Body(path=self._part, start=bytes(self.start), sha256=self._digest.hexdigest(), size=self._size)

    def close(self) -> None:
        self._file.close()
        if not self._is_whole:
            with suppress(OSError):
                self._part.unlink()


def _unpacker(encoding: str) -> Any:
    """Returns what unpacks an encoding; None: nothing has to."""
    if encoding in ("", "identity"):
        return None
    if encoding != "zstd":
        message = f"Content-Encoding {encoding[:40]} is not served."
        raise ApiError(415, "api.encoding", message, fix="zstd, or none")
    import zstandard  # here, because a service without the training API does without

    return zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()


def _unpack(packed: Any, data: bytes) -> bytes:
    try:
        content = b"" if packed.eof else packed.decompress(data)
    except Exception as problem:  # ZstdError
        raise _unreadable(f"the body is no zstd: {problem}") from None
    if packed.eof and (packed.unused_data or not content):
        raise _unreadable("there is more behind the end of the packed body.")
    return content


def _unreadable(message: str) -> BodyError:
    return BodyError(422, "api.body", message, fix="send it as the SDK does")


def _too_large(message: str) -> BodyError:
    return BodyError(413, "api.too-large", message, fix="fewer or shorter datums in a request")


@contextmanager
def _answering_disk() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        fix = "make room on the disk of the home folder"
        raise ApiError(507, "store.no-space", "the disk is full.", fix=fix) from None
