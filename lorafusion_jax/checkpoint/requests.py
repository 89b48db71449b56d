"""Requests to a running run: JSON files in `control/` of its folder, which the run reads.

{"action": "pause", "adapter": "law"}    with {"weight": 2.0} for `weight`, {"epochs": 1} or {"steps": 50} for `extend`
{"action": "add", "adapters": [{"name": "tax", "data": {"train": "/data/tax.jsonl"}}]}    settings as in config.yaml

File names begin with the time, so requests are executed in the order in which they were made.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lorafusion_jax.config.schema import ADAPTER_NAME, AdapterConfig
from lorafusion_jax.config.values import LARGEST_FLOAT32
from lorafusion_jax.files import PART, remove_folder, replace_text
from lorafusion_jax.readable import SETTINGS, read_text

FOLDER, REFUSED = "control", "refused"
PART_NAME = re.compile(rf"\.\d+-(\d{{1,9}})\.json{re.escape(PART)}")  # of a request that is being written
MOST_MORE = 2**31 - 1  # epochs or steps of one request
Action = Literal["cancel", "pause", "continue", "finish", "weight", "extend", "add"]
STATUS_AFTER: Mapping[Action, str] = {
    "cancel": "cancelled", "pause": "paused", "continue": "running", "extend": "running", "add": "running",
}  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        name: name of its file.
        adapters: names of its adapters: one, or any number for `add`.
        weight: new weight, for `weight`.
        epochs, steps: what `extend` adds; exactly one is set.
        settings: settings of the new adapters, for `add`.
    """

    name: str
    action: Action
    adapters: tuple[str, ...]
    weight: float | None = None
    epochs: int | None = None
    steps: int | None = None
    settings: tuple[AdapterConfig, ...] = ()

    @property
    def description(self) -> str:
        """Short description of the request."""
        return f"{self.action} {', '.join(self.adapters)}"

    @staticmethod
    def read(file: Path) -> Request:
        """Reads a file.

        Raises:
            OSError: it is not a file, or too large.
            ValueError: the file is not a valid request.
        """
        content = json.loads(read_text(file, SETTINGS))
        if not isinstance(content, dict) or content.get("action") not in ACTIONS:
            raise ValueError(f"no action of {', '.join(ACTIONS)}")
        action: Action = content["action"]
        if action == "add":
            entries = content.get("adapters")
            if not isinstance(entries, list) or not entries:
                raise ValueError("no list of adapters")
            settings = tuple(AdapterConfig.model_validate(entry) for entry in entries)
            return Request(name=file.name, action=action, adapters=tuple(s.name for s in settings), settings=settings)
        if not isinstance(adapter := content.get("adapter"), str) or not re.match(ADAPTER_NAME, adapter):
            raise ValueError("no name of an adapter")
        weight, epochs, steps = (content.get(key) for key in ("weight", "epochs", "steps"))
        if action == "weight" and not is_weight(weight):
            raise ValueError(f"{weight!r} is not a positive number")
        if action == "extend" and not is_extension(epochs, steps):
            raise ValueError("either epochs or steps must be a whole number from 1")
        request = Request(name=file.name, action=action, adapters=(adapter,))
        if action == "weight":
            return replace(request, weight=weight)
        return replace(request, epochs=epochs, steps=steps) if action == "extend" else request


def is_extension(epochs: object, steps: object) -> bool:
    """Whether exactly one of epochs and steps is given and is valid."""
    amounts = [value for value in (epochs, steps) if value is not None]
    return len(amounts) == 1 and type(amounts[0]) is int and 1 <= amounts[0] <= MOST_MORE


def is_weight(value: object) -> bool:
    """Whether this is a valid weight of an adapter."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value <= LARGEST_FLOAT32  # a whole number may have more digits than any float


def write_request(folder: Path, action: Action, adapter: str, weight: float | None = None, **options: int) -> Path:
    """Writes a request about an adapter of the run in `folder`, atomically.

    Args:
        options: `epochs` or `steps`, for "extend".

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> file = write_request(folder, "pause", "law")
    >>> [request_file == file for request_file in request_files(folder)], Request.read(file).description
    ([True], 'pause law')
    """
    content = {"action": action, "adapter": adapter} | ({} if weight is None else {"weight": weight})
    return _write(folder, content | options)


def write_addition(folder: Path, adapters: Sequence[AdapterConfig]) -> Path:
    """Writes a request to add adapters to the run in `folder`."""
    return _write(folder, {"action": "add", "adapters": [adapter.model_dump(mode="json") for adapter in adapters]})


def _write(folder: Path, content: dict[str, Any]) -> Path:
    home = folder / FOLDER
    home.mkdir(exist_ok=True)
    file = home / f"{time.time_ns():020d}-{os.getpid()}.json"
    replace_text(file, json.dumps(content))
    return file


def remove_parts(folder: Path) -> None:
    """Removes what killed processes have left of their requests. Those of processes that live are being written."""
    for part in (folder / FOLDER).glob(f".*.json{PART}"):
        writer = PART_NAME.fullmatch(part.name)
        if writer and not _lives(int(writer[1])):
            part.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def put_away(file: Path) -> None:
    """Moves what was refused to `control/refused/`, whatever it is; an older one of the same name goes.

    Raises:
        OSError: it cannot be moved.
    """
    home = file.parent / REFUSED
    home.mkdir(exist_ok=True)
    target = home / file.name
    if target.is_dir() and not target.is_symlink():
        remove_folder(target)
    file.replace(target)


def request_files(folder: Path) -> list[Path]:
    """Returns the files of pending requests, oldest first. Lists one folder."""
    try:
        names = os.listdir(folder / FOLDER)
    except OSError:  # there is no such folder, or it is none
        return []
    return [folder / FOLDER / name for name in sorted(names) if name.endswith(".json") and not name.startswith(".")]


def pending_requests(folder: Path) -> list[Request]:
    """Returns the pending requests, oldest first, without what is none: the run reports that."""
    requests = []
    for file in request_files(folder):
        with suppress(Exception):  # whatever is in that folder
            requests.append(Request.read(file))
    return requests


def status_after_requests(folder: Path, status: Mapping[str, str]) -> dict[str, str]:
    """Returns the status of each adapter once the pending requests are executed. The run refuses those that are wrong.

    Args:
        status: of each adapter of the run.
    """
    after = dict(status)
    for request in pending_requests(folder):
        for name in request.adapters:
            if request.action == "add":
                after.setdefault(name, "running")
            elif name in after and not has_ended(request.action, after[name]):
                after[name] = STATUS_AFTER.get(request.action, after[name])
    return after


def has_ended(action: Action, status: str) -> bool:
    """Whether an adapter of this status has nothing left for this action."""
    return status in ("failed", "cancelled") or (status == "done" and action != "extend")
