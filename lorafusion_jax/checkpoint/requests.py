"""What a user asks of a run while it trains: small files in `control/` of its folder, which the run picks up.

{"action": "pause", "adapter": "law"}    and for `weight` also {"weight": 2.0}

Names begin with the time, so requests are carried out in the order in which they were made.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lorafusion_jax.files import replace_text

FOLDER = "control"
Action = Literal["cancel", "pause", "continue", "finish", "weight"]
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        name: of its file.
        weight: the new one, of `weight`.
    """

    name: str
    action: Action
    adapter: str
    weight: float | None = None

    @staticmethod
    def read(file: Path) -> Request:
        """Reads a file.

        Raises:
            ValueError: it is no request.
        """
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("action") not in ACTIONS:
            raise ValueError(f"no action of {', '.join(ACTIONS)}")
        if not isinstance(found.get("adapter"), str):
            raise ValueError("no adapter")
        weight = found.get("weight") if found["action"] == "weight" else None
        if found["action"] == "weight" and not is_weight(weight):
            raise ValueError(f"{weight!r} is no positive number")
        return Request(name=file.name, action=found["action"], adapter=found["adapter"], weight=weight)


def is_weight(value: object) -> bool:
    """Whether an adapter can have this weight."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def write_request(folder: Path, action: Action, adapter: str, weight: float | None = None) -> Path:
    """Asks something of the run in `folder`; the file is there whole or not at all.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> file = write_request(folder, "pause", "law")
    >>> [request_file == file for request_file in request_files(folder)], Request.read(file).adapter
    ([True], 'law')
    """
    home = folder / FOLDER
    home.mkdir(exist_ok=True)
    file = home / f"{time.time_ns():020d}-{os.getpid()}.json"
    content = {"action": action, "adapter": adapter} | ({} if weight is None else {"weight": weight})
    replace_text(file, json.dumps(content))
    return file


def request_files(folder: Path) -> list[Path]:
    """Requests that wait, oldest first; one look at one folder."""
    try:
        names = os.listdir(folder / FOLDER)
    except FileNotFoundError:
        return []
    return [folder / FOLDER / name for name in sorted(names) if name.endswith(".json") and not name.startswith(".")]
