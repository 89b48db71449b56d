"""python -m lorafusion_serve.control.child_process: answers requests, one JSON a line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lorafusion_serve.control.check import check
from lorafusion_serve.control.inspect import count, preview
from lorafusion_serve.control.render import render_rows


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
            return count(Path(request["file"]))


def main() -> int:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        output.write(json.dumps(answer(json.loads(line))) + "\n")
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
