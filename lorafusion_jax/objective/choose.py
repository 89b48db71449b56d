"""From what a job file says under `objective` to an objective with its settings. Never imports jax.

From another package, install an entry point of the group `lorafusion_jax.objectives` that loads an `Objective`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from lorafusion_jax.objective.protocol import OBJECTIVES, Chosen, Objective
from lorafusion_jax.plugins import find, not_known

GROUP = "lorafusion_jax.objectives"


def objective(name: str) -> Objective:
    """Finds an objective by the name that a job file gives it.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, OBJECTIVES, name, Objective)


def unknown_objective(name: str) -> str | None:
    """What `objective.name` should have been; None for a name that exists."""
    return not_known(GROUP, OBJECTIVES, name)


def choose(name: str, options: Mapping[str, Any]) -> Chosen:
    """Gives an objective its settings.

    Raises:
        ValueError: an option that the objective does not have.
        pydantic.ValidationError: a value that an option cannot have.
        ConfigError: as `objective`.
    """
    found = objective(name)
    known = {each.name: each for each in dataclasses.fields(found.options)}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            has = f"the options {', '.join(sorted(known))}" if known else "no options"
            raise ValueError(
                f"options of {name}, which has {has}, not '{key}'" + (f"; did you mean '{near[0]}'?" if near else "")
            )
    # As in the rest of a job file, true is no number: a text is refused where a number is due.
    given = {
        key: str(value).lower() if isinstance(value, bool) and known[key].type not in (bool, "bool") else value
        for key, value in options.items()
    }
    return Chosen(name=name, objective=found, options=TypeAdapter(found.options).validate_python(given))
