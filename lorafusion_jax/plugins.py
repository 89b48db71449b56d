"""Lookup of named extensions: first in a built-in table, then among installed entry points.

An installed distribution adds one in its `pyproject.toml`; a job file then names it:

    [project.entry-points."lorafusion_jax.optimizers"]
    tiger = "my_package.tiger:TIGER"

A job file can only name installed extensions; it never contains a path or an import.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from lorafusion_jax.errors import ConfigError, did_you_mean

_LOADED: dict[str, str] = {}  # package of an extension → the extension, as messages name it


def known_names(group: str, builtin: Mapping[str, object]) -> list[str]:
    """Lists the names of a group: built-in ones first, then installed ones."""
    return [*builtin, *sorted(set(_entry_points(group)) - set(builtin))]


def not_known(group: str, builtin: Mapping[str, object], name: str) -> str | None:
    """Explains an unknown name, with the known ones; None if the name exists."""
    if name in builtin:  # looking through everything that is installed takes 30 to 100 ms
        return None
    names = known_names(group, builtin)
    if name in names:
        return None
    near = did_you_mean(name, names)
    return f"one of {', '.join(names)}, not '{name}'" + (f"; {near}" if near else "")


def find[T](group: str, builtin: Mapping[str, T], name: str, kind: type[T]) -> T:
    """Finds an extension by name.

    Args:
        group: group of entry points, e.g. "lorafusion_jax.optimizers".
        builtin: built-in table; installed entry points cannot replace its names.
        name: name in a job file.
        kind: required type of the loaded object.

    Raises:
        ConfigError: `plugin.unknown`, the name does not exist; `plugin.broken`, the entry point does not load, or loads
            an object of another type.
    """
    if name in builtin:
        return builtin[name]
    wrong = not_known(group, builtin, name)
    if wrong is not None:
        raise ConfigError("plugin.unknown", f"there is no '{name}' among {group}.", fix=wrong)
    point = _entry_points(group)[name]
    extension = _load(point)
    _LOADED.setdefault(point.module.partition(".")[0], f"'{name}' of {group}")
    if not isinstance(extension, kind):
        raise ConfigError(
            "plugin.broken",
            f"'{name}' of {group} is not of type {kind.__name__}.",
            where=_where(point),
            why=f"it is a {type(extension).__name__}",
        )
    return extension


def origin(group: str, name: str) -> str:
    """Says where an extension comes from: its object and its package; "" for a built-in one."""
    point = _entry_points(group).get(name)
    return "" if point is None else _where(point)


def plugin_fault(problem: BaseException) -> ConfigError | None:
    """Returns an error that names the extension whose code raised; None if no code of one was running."""
    cause: BaseException | None = problem
    cause_ids: set[int] = set()
    while cause is not None and id(cause) not in cause_ids:  # an event that failed is context and effect of its bug
        cause_ids.add(id(cause))
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        for frame in reversed(frames):
            module = str(frame.f_globals.get("__name__", ""))
            if (name := _LOADED.get(module.partition(".")[0])) is not None:
                return ConfigError(
                    "plugin.failed",
                    f"{name} raised {type(problem).__name__}.",
                    where=f"{frame.f_code.co_filename}, line {frame.f_lineno}",
                    why=str(problem).partition("\n")[0],
                    fix="repair or update the package that it comes from, or choose another in the job file",
                )
        cause = cause.__cause__ or cause.__context__
    return None


def _entry_points(group: str) -> Mapping[str, EntryPoint]:
    return _installed(tuple((path, _changed_at(path)) for path in sys.path)).get(group, {})


@lru_cache(maxsize=1)  # a prediction of memory asks for the kinds of its adapters thousands of times
def _installed(paths: tuple[tuple[str, int], ...]) -> Mapping[str, Mapping[str, EntryPoint]]:
    """Reads the entry points of all groups. To install or remove a package changes the folder that it is in."""
    del paths
    groups: dict[str, dict[str, EntryPoint]] = defaultdict(dict)
    for point in entry_points():
        groups[point.group].setdefault(point.name, point)
    return dict(groups)


def _changed_at(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as problem:  # code of another package may raise anything
        raise ConfigError(
            "plugin.broken",
            f"'{point.name}' of {point.group} does not load.",
            where=_where(point),
            why=f"{type(problem).__name__}: {problem}",
            fix="update or remove the package that it comes from",
        ) from problem


def _where(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an installed package"
    return f"{point.value}, from {package}"
