"""`lorafusion serve` whose workers are forks, as it is one itself: nothing imports jax again.

python -m campaigns.serve_forked SOCKET OPTIONS
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import IO, Any

from forked_commands import Command

from lorafusion_jax.__main__ import main
from lorafusion_jax.serve.control import launch

MODULES = ("lorafusion_jax.serve.server", "lorafusion_jax.serve.worker.loop")


def serve() -> None:
    server = sys.argv.pop(1)

    def fork(words: list[str], *, stdout: IO[bytes], **_: Any) -> Command:
        return Command(words[1:], os.environ, log=stdout.fileno(), server=server)

    with_forks = SimpleNamespace(**vars(subprocess) | {"Popen": fork})
    launch.subprocess = with_forks  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv.insert(1, "serve")
    main()


if __name__ == "__main__":
    serve()
