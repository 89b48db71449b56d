"""Checks of the planner's inputs. Every error says what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from scheduling.errors import PlanError
from scheduling.types import AdapterJob, Limits, as_whole

MOST_SIZES = 4  # every capacity is compiled


def check_jobs(jobs: Sequence[AdapterJob], *, capacity_tokens: object, **limits: object) -> Limits:
    """Raises `PlanError` if the jobs cannot be planned; returns the limits as plain integers."""
    *smaller, largest = check_sizes(capacity_tokens)
    counts: dict[str, int] = {}
    for name, value in limits.items():
        count = as_whole(value)
        if count is None or count < 1:
            raise PlanError("plan.setting", f"{name} must be a whole number of at least 1, not {value!r}")
        counts[name] = count
    if not jobs:
        raise PlanError("plan.no-jobs", "no adapters to plan", fix="give at least one AdapterJob")
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError("plan.duplicate-name", f"two adapters have the name {twice!r}", fix="rename one of them")
    checked_limits = Limits(capacity_tokens=largest, smaller=tuple(smaller), **counts)
    capacity, tile = checked_limits.sizes[0], checked_limits.tile_tokens
    if capacity < tile:
        raise PlanError(
            "plan.capacity",
            f"a microbatch of {capacity} tokens has no room for one tile of {tile}",
            fix=f"capacity_tokens: {tile} or more",
        )
    _refuse_long_samples(jobs, checked_limits.tiles * tile, tile)
    return checked_limits


def check_sizes(capacity_tokens: object) -> tuple[int, ...]:
    """Returns the capacities, ascending.

    Raises:
        PlanError: `plan.setting`, not one to four different whole numbers.
    """
    several = isinstance(capacity_tokens, (tuple, list))
    sizes: list[int] = []
    for value in cast("Sequence[object]", capacity_tokens) if several else [capacity_tokens]:
        size = as_whole(value)
        if size is None or size < 1:
            raise PlanError("plan.setting", f"capacity_tokens must be a whole number of at least 1, not {value!r}")
        sizes.append(size)
    if not 0 < len(set(sizes)) == len(sizes) <= MOST_SIZES:
        raise PlanError(
            "plan.setting",
            f"capacity_tokens must be one to {MOST_SIZES} different numbers, not {sizes}",
            why="programs are compiled for each of them",
        )
    return tuple(sorted(sizes))


def check_time_limit(seconds: object) -> float:
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not (math.isfinite(seconds) and seconds >= 0)
    ):
        raise PlanError("plan.setting", f"time_limit_s must be a number of seconds, not {seconds!r}")
    return seconds


def check_rests(rests: Mapping[str, Sequence[object]], jobs: Sequence[AdapterJob]) -> None:
    names = [job.name for job in jobs]
    for name, batches in rests.items():
        if name not in names:
            raise PlanError("plan.setting", f"rests name {name!r}, and there is no such job", fix=", ".join(names))
        counts = [as_whole(batch) or 0 for batch in batches]
        if counts != sorted(counts) or min(counts, default=1) < 1:
            message = f"rests of {name} must be numbers of batches, ascending from 1 on, not {list(batches)}"
            raise PlanError("plan.setting", message)


def _refuse_long_samples(jobs: Sequence[AdapterJob], room: int, tile: int) -> None:
    problems: list[str] = []
    longest = 0
    for job in jobs:
        lengths = np.asarray(job.sample_tokens)
        for index in np.flatnonzero(lengths > room):
            problems.append(f"{job.name}: sample {index} has {lengths[index]} tokens")
            longest = max(longest, int(lengths[index]))
    if problems:
        raise PlanError(
            "plan.sample-too-long",
            f"{problems[0]}, but a microbatch holds {room} ({len(problems)} such samples)",
            problems=tuple(problems),
            fix=f"capacity_tokens: {-(-longest // tile) * tile} or more, or cut or drop these samples",
        )
