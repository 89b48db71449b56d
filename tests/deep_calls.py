"""Room for calls that nest deeply, as those of a trace do.

CPython keeps the frames of a thread in chunks of 16 KiB, and gives a chunk back as soon as the frame that began it
returns. A loop whose calls cross the end of a chunk maps and unmaps memory in each of them: below the frames of pytest,
that was up to half of the processor time of a test that traces and lowers. A frame as large as this one gets a chunk of
2 MiB, and all that it calls shares the other half of it.
"""

from __future__ import annotations

from collections.abc import Callable


def with_room[T](call: Callable[[], T]) -> T:
    """What the call returns."""
    return call()


with_room.__code__ = with_room.__code__.replace(co_stacksize=2**17)  # values of 8 bytes
