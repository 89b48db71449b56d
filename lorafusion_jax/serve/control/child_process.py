"""python -m lorafusion_jax.serve.control.child_process: answers requests, one JSON a line, within their limits."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lorafusion_jax.serve.control.check import check
from lorafusion_jax.serve.control.inspect import count, preview
from lorafusion_jax.serve.control.render import render_rows

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ADDRESSES = 4 << 30
LOWER = 5  # priority for the processor than the server's


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request."""
    match request["what"]:
        case "check":
            return check(request["values"], request["places"])
        case "preview":
            return preview(request["values"], request["row"])
        case "render":
            return render_rows(request)
        case _:
            return count(Path(request["file"]), request["most_bytes"])


def limit(seconds: float, memory_bytes: int) -> None:
    """Limits the processor time and the memory that this process may take from now on; then the system ends it.

    Libraries reserve addresses that they never use, so these have a wider limit than memory that can be written.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes + ADDRESSES, resource.RLIM_INFINITY))


def data_bytes() -> int:
    """Memory of this process that it can write."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def stay_small() -> None:
    """Ends with the server, before any other process when the machine has no memory, and leaves the processor to it."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    os.nice(LOWER)
    with suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> int:
    parent = os.getppid()
    for stop in (signal.SIGINT, signal.SIGTERM):  # a service manager sends them to all processes of a service at once:
        signal.signal(stop, signal.SIG_IGN)  # a job whose check had ended so would be rejected
    stay_small()
    if os.getppid() != parent:  # it ended before it could be noticed
        return 1
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    at_start = data_bytes()
    for line in sys.stdin:
        request = json.loads(line)
        limit(request["limits"]["seconds"], at_start + request["limits"]["bytes"])
        output.write(json.dumps(answer(request)) + "\n")
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
