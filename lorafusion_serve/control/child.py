"""Work on what clients sent runs in a child process: a file that takes all memory ends the child, not the server.

One child serves request after request, because starting one takes seconds. A child that fails or takes too long is
replaced.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, Literal

from lorafusion_serve.control.answering import AnsweringProcess
from lorafusion_serve.refusals import completed

LIMIT_S = 900
MOST_REQUESTS = 200  # of one child: what its libraries keep in memory goes with it
log = logging.getLogger("lorafusion.child")


class Child:
    """Asks a child process, one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: AnsweringProcess | None = None
        self._served = 0

    def ask(self, question: Literal["check", "count", "preview", "render"], request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer; a child that fails is a problem of the request."""
        with self._lock:
            try:
                answer = self._ask({"what": question} | request)
                return answer | {"problems": [completed(problem) for problem in answer["problems"]]}
            except (OSError, ValueError) as problem:
                log.warning("%s failed: %s", question, problem)
                self._end()
        text = "the data could not be read: it took too much memory or time."
        return {"problems": [completed({"code": "data.check", "where": "data", "what": text, "fix": "smaller data"})]}

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._served >= MOST_REQUESTS:
            self._end()
        if self._process is None:
            self._process = AnsweringProcess([sys.executable, "-m", "lorafusion_serve.control.child_process"])
        self._served += 1
        return self._process.ask(request, LIMIT_S)

    def _end(self) -> None:
        process, self._process, self._served = self._process, None, 0
        if process is not None:
            process.end()
