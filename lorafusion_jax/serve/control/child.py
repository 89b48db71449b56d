"""Work on what clients sent runs in child processes: a file that takes all memory ends a child, not the server.

There is a lane for each kind of work, with one child that serves request after request, because starting one takes
seconds. A lane gives every owner a turn: who asks for much waits for himself. Nobody who waits holds a thread. A child
that fails or takes too long is replaced.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from lorafusion_jax.serve.refusals import completed
from lorafusion_jax.serve.watched import start_watched
from lorafusion_jax.serve.wire import Message

END_S = 3.0
Question = Literal["check", "count", "preview", "render"]
Answer = dict[str, Any]
MOST_WAITING = 8  # requests of an owner in a lane
MOST_REQUESTS = 200  # of one child: what its libraries keep in memory goes with it
IDLE_S = 300.0  # after which a child ends
CLOSE_S = 5.0
log = logging.getLogger("lorafusion.child")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request.

    Attributes:
        seconds: of the wall clock, and of the processor.
        share: of the memory of all children.
    """

    seconds: float
    share: float


LANES: Mapping[Question, Limits] = {
    "preview": Limits(seconds=30, share=0.25),
    "count": Limits(seconds=300, share=0.25),
    "check": Limits(seconds=900, share=0.5),
}


class ServerEnds(Exception):
    """The server ended before the request was answered."""


class TooManyWaiting(Exception):
    """An owner has as many requests in a lane as he may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    message: dict[str, Any]
    answer: Future[Answer] = field(default_factory=Future)


class Child:
    """Asks the child processes.

    Args:
        memory_bytes: that all children together may take for their requests.
    """

    def __init__(self, memory_bytes: int = 1 << 30):
        self._lanes = {name: _Lane(name, limits, memory_bytes) for name, limits in LANES.items()}

    def is_full(self, owner: str, question: Question) -> bool:
        """Whether an owner has as many requests in a lane as he may have."""
        return self._lanes[question].waiting(owner) >= MOST_WAITING

    def submit(
        self, owner: str, question: Question, request: dict[str, Any], *, most: int = MOST_WAITING
    ) -> Future[Answer]:
        """Returns the answer as it will be; a child that fails is a problem of the request.

        The future is cancelled, or raises `ServerEnds`, if the server ends before.

        Args:
            owner: who takes turns with others.
            most: requests that he may have in the lane.

        Raises:
            TooManyWaiting: he has as many.
        """
        lane = "count" if question == "render" and request["most"] is None else question
        return self._lanes["preview" if lane == "render" else lane].submit(owner, {"what": question} | request, most)

    def waiting(self) -> dict[str, int]:
        """How many requests wait in each lane."""
        return {name: lane.waiting() for name, lane in self._lanes.items()}

    def close(self, seconds: float = CLOSE_S) -> None:
        """Ends the children at once; what waits is cancelled.

        Args:
            seconds: to wait for them. One that hangs in a read of a disk or a network ends when the system lets it.
        """
        until = time.monotonic() + seconds
        for lane in self._lanes.values():
            lane.end()
        for lane in self._lanes.values():
            lane.join(max(0.0, until - time.monotonic()))


class _Lane:
    def __init__(self, name: str, limits: Limits, memory_bytes: int):
        self._name, self._limits = name, {"seconds": limits.seconds, "bytes": int(limits.share * memory_bytes)}
        self._waiting: dict[str, deque[_Request]] = {}  # by owner, the one whose turn it is first
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._thread: threading.Thread | None = None
        self._process: AnsweringProcess | None = None
        self._served = 0

    def submit(self, owner: str, message: dict[str, Any], most: int) -> Future[Answer]:
        request = _Request(message=message | {"limits": self._limits})
        with self._changed:
            if len(self._waiting.get(owner, ())) >= most:
                raise TooManyWaiting
            if self._ended.is_set():
                request.answer.cancel()
                return request.answer
            self._waiting.setdefault(owner, deque()).append(request)
            if self._thread is None:
                self._thread = start_watched(f"child {self._name}", self._work, self._ended)
            self._changed.notify()
        return request.answer

    def waiting(self, owner: str | None = None) -> int:
        """Requests of an owner, or of all."""
        with self._changed:
            return sum(map(len, self._waiting.values())) if owner is None else len(self._waiting.get(owner, ()))

    def end(self) -> None:
        with self._changed:
            self._ended.set()
            queues, self._waiting = self._waiting, {}
            self._changed.notify()
        for requests in queues.values():
            for request in requests:
                request.answer.cancel()
        if (process := self._process) is not None:
            process.kill()  # its reader sees the end of it

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
        if self._thread is None or not self._thread.is_alive():
            self._end()

    def _work(self) -> None:
        while not self._ended.is_set():
            request = self._next()
            if request is None:
                self._end()
            elif request.answer.set_running_or_notify_cancel():
                answer = self._answer(request.message)
                if self._ended.is_set() and answer["problems"]:  # maybe of a child that `end` has killed
                    request.answer.set_exception(ServerEnds())
                else:
                    request.answer.set_result(answer)

    def _next(self) -> _Request | None:
        """Waits for a request of the owner whose turn it is; None: nobody asked for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended.is_set(), IDLE_S if self._process else None)
            if not self._waiting:
                return None
            owner = next(iter(self._waiting))
            requests = self._waiting.pop(owner)
            request = requests.popleft()
            if requests:
                self._waiting[owner] = requests  # behind the others
            return request

    def _answer(self, message: dict[str, Any]) -> Answer:
        began = time.monotonic()
        try:
            answer = self._ask(message)
            return answer | {"problems": [completed(problem) for problem in answer["problems"]]}
        except Exception as problem:
            log.warning("%s failed after %.1f s: %r", message["what"], time.monotonic() - began, problem)
            self._end()
        limits = f"{self._limits['seconds']:g} s and {self._limits['bytes'] >> 20} MiB"
        text = "the data could not be read: it took too much memory or time."
        why, fix = f"a request of this kind has {limits}", "smaller data, or lorafusion serve --child-memory-gib"
        return {"problems": [completed({"code": "data.check", "where": "data", "what": text, "why": why, "fix": fix})]}

    def _ask(self, message: dict[str, Any]) -> Answer:
        if self._served >= MOST_REQUESTS:
            self._end()
        if self._process is None:
            self._process = AnsweringProcess([sys.executable, "-m", "lorafusion_jax.serve.control.child_process"])
            if self._ended.is_set():
                self._process.kill()
        self._served += 1
        return self._process.ask(message, self._limits["seconds"])

    def _end(self) -> None:
        process, self._process, self._served = self._process, None, 0
        if process is not None:
            with suppress(OSError):
                process.end()


class AnsweringProcess:
    """Asks one request at a time. The process gets no signals of the server's terminal: the server ends it.

    Args:
        command: starts the process.
    """

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def ask(self, request: Message | None, limit_s: float) -> Any:
        """Returns the answer; without a request, what the process says by itself.

        Raises:
            OSError, ValueError: it has ended, or did not answer within the limit and was killed.
        """
        late = threading.Timer(limit_s, self._process.kill)
        late.start()
        try:
            if request is not None:
                self._input.write(json.dumps(request) + "\n")
                self._input.flush()
            return json.loads(self._output.readline())
        finally:
            late.cancel()

    def kill(self) -> None:
        """Kills the process; who asks it notices."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs in a call of the system
            self._process.wait(END_S)
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
