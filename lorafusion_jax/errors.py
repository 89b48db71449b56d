"""Errors for users: what is wrong, where, why, and how to fix it."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_SHOWN = 2000  # characters of each part of a message
MOST_NAMES = 6  # of adapters with one message
_STOP = re.compile(r"(?<=[\w'\")\]])([?.])\.(?=\s|$)")  # after a sentence with an end: "did you mean 'adamw'?."


class LoraFusionError(Exception):
    """Base class of errors that a user can cause or fix.

    Shown as::

        error[data.empty-loss] med: 2412 of 2500 rows have no token to learn from.
          where: data/med.jsonl, row 0
          because data.max_length=4096 cuts the answer
          fix: data.max_length: 16384

    Args:
        code: stable, searchable name, `room.problem`.
        what: one sentence.
        where: file, row, key or tensor.
        why: the cause, if known.
        fix: what to type or change.
    """

    exit_code = 1

    def __init__(self, code: str, what: str, *, where: str = "", why: str = "", fix: str = ""):
        what, why, fix = (_STOP.sub(r"\1", text) for text in (what, why, fix))
        self.code, self.what, self.where, self.why, self.fix = code, what, where, why, fix
        super().__init__(str(self))

    def __reduce__(self):
        return _rebuild, (type(self), self.code, self.what, self.where, self.why, self.fix)

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {shortened_text(self.what)}"]
        lines += [f"  where: {shortened_text(self.where)}"] if self.where else []
        lines += [f"  because {shortened_text(self.why)}"] if self.why else []
        lines += [f"  fix: {shortened_text(self.fix)}"] if self.fix else []
        return "\n".join(lines)


class ConfigError(LoraFusionError, ValueError):
    """A job file or command is invalid."""

    exit_code = 2


class DataError(LoraFusionError, ValueError):
    """A data set cannot be read or has nothing to learn from."""

    exit_code = 2


class CheckpointError(LoraFusionError, ValueError):
    """A model, adapter or run folder is incomplete or does not fit."""

    exit_code = 2


class RunError(LoraFusionError, RuntimeError):
    """A run cannot continue."""


class CallError(LoraFusionError, ValueError):
    """A call of a training client failed; it has added nothing, and later calls run.

    Attributes:
        category: whose mistake it is, "user" or "server".
    """

    exit_code = 2
    category = "user"


class ServerCallError(CallError):
    """A call that failed through no fault of its client."""

    exit_code = 1
    category = "server"


class ErrorList(LoraFusionError, ValueError):
    """Several errors that are reported together."""

    def __init__(self, errors: Sequence[LoraFusionError]):
        self.errors = tuple(errors)
        self.exit_code = max(error.exit_code for error in self.errors)
        Exception.__init__(self, str(self))
        self.code = self.errors[0].code

    def __reduce__(self):
        return ErrorList, (self.errors,)

    def __str__(self) -> str:
        """One text for the members of a sweep whose errors differ in their names alone."""
        texts: dict[tuple[str, str], list[str]] = {}
        for error in self.errors:
            name = re.match(r"[\w.@+-]+(?=: )", error.what)
            begin = len(f"error[{error.code}] ")
            key = (str(error)[:begin], str(error)[begin + name.end() :]) if name else (str(error), "")
            texts.setdefault(key, []).extend([name[0]] if name else [])
        return "\n".join(before + first_few(names, MOST_NAMES) + after for (before, after), names in texts.items())


def raise_all(errors: Sequence[LoraFusionError]) -> None:
    """Raises nothing if there are no errors, a single error itself, or an `ErrorList`."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ErrorList(errors)


def unique(errors: Sequence[LoraFusionError]) -> list[LoraFusionError]:
    """Removes repeated errors. A sweep repeats the errors of its entry."""
    return list({str(error): error for error in errors}.values())


def first_few(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Joins the first items and counts the rest.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    last = " and" if separator == ", " else f"{separator}and"
    ending = f"{last} {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + ending


def shortened_text(text: str, most: int = MOST_SHOWN) -> str:
    """Cuts a long text in the middle, where it says least.

    >>> shortened_text("0123456789", 7)
    '012 … 789'
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def quoted(path: object) -> str:
    """Returns a path or a text as a shell reads it in a command.

    >>> quoted("runs/exp1"), quoted("my runs/exp1")
    ('runs/exp1', "'my runs/exp1'")
    """
    return shlex.quote(str(path))


def did_you_mean(name: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """Asks for the known names that are most similar to a wrong one; empty if none is similar.

    >>> did_you_mean("stags", ["stages", "data"])
    "did you mean 'stages'?"
    """
    near = difflib.get_close_matches(name, list(names), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def did_you_mean_path(typed: Path, names: Iterable[str], *, are_files: bool = False) -> str:
    """Asks for the file or folder beside a missing one whose name is most similar, as it is typed; empty if none is.

    >>> did_you_mean_path(Path("runs/sweeep"), ["sweep", "demo"])
    "did you mean 'runs/sweep'?"
    >>> did_you_mean_path(Path("law.yaml"), ["med.yaml"], are_files=True)  # the same ending makes no names similar
    ''
    """
    by_name = {Path(name).stem if are_files else name: name for name in names}
    near = difflib.get_close_matches(typed.stem if are_files else typed.name, by_name, n=1)
    return f"did you mean '{typed.with_name(by_name[near[0]])}'?" if near else ""


def _rebuild(kind, code, what, where, why, fix):
    return kind(code, what, where=where, why=why, fix=fix)


def install_line(extra: str, root: Path = ROOT) -> str:
    """Returns the command that installs an extra of this package from where the package itself came.

    Where that is not known, it installs the packages of the extra: this one is in no registry.

    Args:
        extra: name of the extra.
        root: folder that holds the package: a checkout, or that of installed packages.
    """
    if (root / "pyproject.toml").is_file():
        return f'pip install -e "{root}[{extra}]"'
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        package = distribution("lorafusion-jax")
    except PackageNotFoundError:
        return f"the extra {extra} of lorafusion-jax"
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if "url" not in origin:
        of_extra = re.compile(rf"""(.*?)\s*;\s*extra == ['"]{extra}['"]""")
        names = [match[1] for line in package.requires or () if (match := of_extra.fullmatch(line))]
        return f"pip install {' '.join(f'"{name}"' for name in names)}"
    version = origin.get("vcs_info", {})
    url = f"{version['vcs']}+{origin['url']}@{version['commit_id']}" if version else origin["url"]
    return f'pip install "lorafusion-jax[{extra}] @ {url}"'
