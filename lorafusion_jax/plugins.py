"""Named things that other packages may add: looked up in a table first, then among installed entry points.

An installed distribution adds one in its `pyproject.toml`; a job file then names it:

    [project.entry-points."lorafusion_jax.optimizers"]
    tiger = "my_package.tiger:TIGER"

A job file can name only what is installed: it never holds a path or an import.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from lorafusion_jax.errors import ConfigError


def known_names(group: str, builtin: Mapping[str, object]) -> list[str]:
    """Lists the names of a group: built-in ones first, then installed ones."""
    return [*builtin, *sorted(set(_installed(group)) - set(builtin))]


def not_known(group: str, builtin: Mapping[str, object], name: str) -> str | None:
    """Says in a few words what a name should have been; None for a name that exists."""
    names = known_names(group, builtin)
    if name in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    return f"one of {', '.join(names)}, not '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")


def find[T](group: str, builtin: Mapping[str, T], name: str, kind: type[T]) -> T:
    """Finds what a name stands for.

    Args:
        group: of entry points, e.g. "lorafusion_jax.optimizers".
        builtin: what this package brings; an installed entry point cannot replace it.
        name: as a job file has it.
        kind: what an entry point must load.

    Raises:
        ConfigError: `plugin.unknown` for a name that does not exist, `plugin.broken` for an entry point that does not
            load or loads something else.
    """
    if name in builtin:
        return builtin[name]
    wrong = not_known(group, builtin, name)
    if wrong is not None:
        raise ConfigError("plugin.unknown", f"there is no '{name}' among {group}.", fix=wrong)
    point = _installed(group)[name]
    found = _load(point)
    if not isinstance(found, kind):
        raise ConfigError(
            "plugin.broken",
            f"'{name}' of {group} is no {kind.__name__}.",
            where=_where(point),
            why=f"it is a {type(found).__name__}",
        )
    return found


def _installed(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as problem:  # whatever another package's import raises
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
