"""Offline autotuner: times every candidate of every kernel for a list of shapes and stores all results in a table.

T packed tokens · K in features · N out features · R padded rank
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from pallas_kernels.arg_specs import LinearSpec
from pallas_kernels.device import is_hopper
from pallas_kernels.policy import padded_rank
from pallas_kernels.tuning import search, store
from pallas_kernels.tuning.timing import time_calls

REASON = 300  # characters of a compiler message to store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A candidate that does not run on this device, and the reason."""

    kernel: str
    shape: str
    config: dict[str, Any]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of the tuner."""

    done: int
    total: int
    kernel: str
    shape: str
    failed: tuple[Failure, ...]


def tune(
    specs: Iterable[LinearSpec],
    path: pathlib.Path | None = None,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    quick: bool = False,
) -> store.Table:
    """Measures the missing entries of the table at `path`. It is written after every kernel and can be continued.

    Args:
        specs: layer shapes, e.g. those of a model, or `arg_specs.tuning_specs()`.
        path: the table. Default: the built-in table of this device.
        progress: called after every group of candidates.
        quick: measures a third of the candidates.
    Raises:
        ValueError: the file at `path` is not a table of this version, or is of another device.

    Example:
        >>> table = tune([LinearSpec(tokens=8192, in_features=4096, out_features=4096)])  # doctest: +SKIP
    """
    kind = jax.devices()[0].device_kind
    path = path or store.DATA / store.file_name(kind)
    table = existing_table(path, kind) or store.Table(device=kind, conditions=conditions())
    groups = [(spec, kernel, group) for spec in specs for kernel, group in _groups(spec, quick).items()]
    num_done, failed = 0, ()
    total = sum(len(group) for _, _, group in groups)
    for spec, kernel, group in groups:
        key = key_of(spec, kernel)
        missing, base_table = [candidate for candidate in group if not table.has(key, candidate.config)], table
        if missing and missing[0] is group[0]:  # measure the baseline again: times of different days are not comparable
            missing, base_table = group, table.without(key, [candidate.config for candidate in group])
        entries, bad = _measure(spec, missing) if missing else ([], [])
        failed += tuple(bad)
        if entries:
            table = dataclasses.replace(
                base_table,
                conditions=joined_conditions(base_table.conditions, conditions()),
                entries=base_table.entries + tuple(entries),
            )
            store.save(table, path)
        num_done += len(group)
        progress(Progress(done=num_done, total=total, kernel=kernel, shape=spec.name, failed=failed))
    return table


def count(specs: Iterable[LinearSpec], *, quick: bool = False) -> int:
    """Number of candidates of `tune` on this device."""
    return sum(len(group) for spec in specs for group in _groups(spec, quick).values())


def existing_table(path: pathlib.Path, device_kind: str) -> store.Table | None:
    """Reads the table at `path` to continue it; None if there is no file.

    Raises:
        ValueError: it is not a table of this version, or is of another device.
    """
    table = store.load(path)
    if table is not None and table.device != device_kind:
        raise ValueError(f"{path} holds times of {table.device}, this device is {device_kind}: write to another file")
    return table


def key_of(spec: LinearSpec, kernel: str) -> tuple:
    sizes = spec.tokens, spec.in_features, spec.out_features, padded_rank(spec.rank)
    return store.key(kernel, *sizes, dropout=spec.rate > 0)


def conditions() -> dict[str, str]:
    """Versions and date of the measurements."""
    platform = " ".join(jax.devices()[0].client.platform_version.split())  # CUDA version, and so that of ptxas
    today = datetime.date.today().isoformat()
    versions = {"jax": jax.__version__, "jaxlib": version("jaxlib"), "platform": platform, "date": today}
    try:
        return versions | {"lorafusion-jax": version("lorafusion-jax")}
    except PackageNotFoundError:  # run from its sources
        return versions


def joined_conditions(old: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    """Conditions of a continued table: all versions and dates of its times."""
    values_by_name = {name: table[name].split(", ") for table in (new, old) for name in table}  # old wins
    return {
        name: ", ".join(dict.fromkeys([*values, new.get(name, values[-1])])) for name, values in values_by_name.items()
    }


def _groups(spec: LinearSpec, quick: bool) -> dict[str, list[search.Candidate]]:
    groups: dict[str, list[search.Candidate]] = {}
    for candidate in search.candidates(spec, quick=quick):
        if is_hopper() or not candidate.kernel.startswith("mosaic"):
            groups.setdefault(candidate.kernel, []).append(candidate)
    return groups


def _measure(spec: LinearSpec, group: list[search.Candidate]) -> tuple[list[store.Entry], list[Failure]]:
    """Times the candidates of one kernel, interleaved. A candidate that does not compile or run counts as failed."""
    inputs, copies = search.make_inputs(spec)
    calls, by_name, failed = {}, {}, []
    for candidate in group:
        name = str(candidate.config)
        fn, sets = jax.jit(_walk(candidate)), _sets(inputs, copies, candidate)
        try:
            jax.block_until_ready(fn(*sets[0]))
        except Exception as error:  # for example too much shared memory or too many registers
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:REASON]}"
            config = dataclasses.asdict(candidate.config)
            failed.append(Failure(kernel=candidate.kernel, shape=spec.name, config=config, reason=reason))
            continue
        calls[name], by_name[name] = (fn, sets), candidate
    entries = []
    for name, timing in time_calls(calls, rounds=7, round_s=0.006).items():
        per_call = len(calls[name][1][0][1])
        times = {field: value / per_call for field, value in dataclasses.asdict(timing).items()}
        candidate = by_name[name]
        entry = store.Entry(
            kernel=candidate.kernel, tokens=spec.tokens, in_features=spec.in_features,
            out_features=spec.out_features, rank=padded_rank(spec.rank), rate=spec.rate,
            config=dataclasses.asdict(candidate.config), **times,
        )  # fmt: skip
        entries.append(entry)
    return entries, failed


def _walk(candidate: search.Candidate):
    def many(inputs, larges, w):
        return [candidate.run(inputs, candidate.config, large, w) for large in larges]

    return many


def _sets(inputs, copies: dict, candidate: search.Candidate) -> list[tuple]:
    """Short kernels run over all copies in one program; GEMMs run over one copy at a time."""
    larges, weights = copies[candidate.large], copies["w"]
    if candidate.bytes:
        return [(inputs, larges, weights[0])]
    return [(inputs, [large], w) for large, w in zip(larges, weights, strict=True)]
