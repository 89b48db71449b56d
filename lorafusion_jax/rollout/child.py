"""The process that runs functions of users, regular expressions and requests to addresses, within limits.

A line of JSON comes in for each call, and one goes out. What functions print goes to the standard error.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
LARGEST_ANSWER = 64 << 20  # bytes, of an address or a function


def main(folder: str, memory_bytes: int, disk_bytes: int) -> None:
    # Only now: what the caller finds from its own folder has been imported, or is on the path.
    os.chdir(folder)
    end_with_run()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tempfile.tempdir = folder
    for limit, value in (("RLIMIT_AS", memory_bytes), ("RLIMIT_FSIZE", disk_bytes), ("RLIMIT_CORE", 0)):
        _, most = resource.getrlimit(getattr(resource, limit))
        within = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(getattr(resource, limit), (within, within))
    functions: dict[str, Callable[..., Any]] = {}
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"value": run(call, functions)}
            text = json.dumps(answer)
        except BaseException as problem:  # of a user's function: anything, `exit` too
            text = json.dumps({"error": _described(problem, Path(call["value"].rpartition(":")[0]).parent)})
        answers.write(f"{text}\n")
        answers.flush()


def end_with_run() -> None:
    """Ends with the run, and not before: schedulers of clusters send SIGTERM to all processes of a run, which saves.

    What a function starts has the handlers of the system again.
    """
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: None)
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be noticed
            sys.exit(1)


def run(call: Mapping[str, Any], functions: dict[str, Callable[..., Any]]) -> Any:
    """Runs one call.

    Args:
        call: kind, value, and the arguments of the kind.
        functions: that were loaded, by FILE.py:function.
    """
    kind, value = call["kind"], call["value"]
    if kind == "match":
        return [float(re.search(value, text) is not None) for text in call["completions"]]
    if kind == "url":
        return _ask(value, {key: call[key] for key in ("prompts", "completions", "columns")}, call["timeout_s"])
    if value not in functions:
        functions[value] = _load(value)
    function = functions[value]
    if kind == "tool":
        return [_text(function(row, texts)) for row, texts in call["turns"]]
    return _numbers(function(**_arguments(function, call)))


def _load(value: str) -> Callable[..., Any]:
    file, _, name = value.rpartition(":")
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _arguments(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Columns go to the parameters of their names; all of them to a function with `**`."""
    columns = {**call["columns"], "prompts": call["prompts"], "completions": call["completions"]}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}


def _numbers(values: Any) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"it returned {type(values).__name__}, not a list with a number for each completion")
    return [None if value is None else float(value) for value in values]


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"it returned {type(value).__name__}, not a text or None")
    return value


def _ask(address: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        content = response.read(LARGEST_ANSWER + 1)
    if len(content) > LARGEST_ANSWER:
        raise ValueError(f"its answer has more than {LARGEST_ANSWER} bytes")
    answer = json.loads(content)
    return _numbers(answer["rewards"] if isinstance(answer, Mapping) else answer)


def _described(problem: BaseException, folder: Path) -> str:
    """The problem, and the last line of it in a file of the function's folder: not one of a library."""
    traced = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(problem.__traceback__)]
    lines = [f", line {line} of {file.name}" for file, line in traced if file.parent == folder]
    try:
        text = str(problem)[:500]
    except Exception:
        text = ""
    return f"{type(problem).__name__}: {text}{lines[-1] if lines else ''}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
