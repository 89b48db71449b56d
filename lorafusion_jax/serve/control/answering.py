"""A process beside the server that answers requests: a line of JSON each, on its standard input and output."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lorafusion_jax.serve.wire import Message

END_S = 3.0


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
