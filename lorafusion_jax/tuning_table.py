"""This machine's tuning tables: where they lie, how commands use them, and how they are passed on.

There is one file per kind of device, `$XDG_CACHE_HOME/lorafusion/tuning/nvidia_l40s.json` on Linux, beside the compiled
programs. Every command that computes reads the folder at its start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all
from lorafusion_jax.files import user_cache
from pallas_kernels import config_store

if TYPE_CHECKING:
    from pallas_kernels.config_store import Table


def table_folder() -> Path:
    return user_cache("tuning")


def table_path(device_kind: str) -> Path:
    """The table of a kind of device on this machine."""
    return table_folder() / config_store.file_name(device_kind)


def use_tables() -> None:
    """Makes the tables of this machine decide its defaults.

    Raises:
        ConfigError, ErrorList: `tune.old-table`, `tune.other-device`.
    """
    problems: list[LoraFusionError] = []
    for path in sorted(table_folder().glob("*.json")):
        try:
            table = read_table(path)
            _check_name(path, table)
            config_store.use(path)
        except LoraFusionError as problem:
            problems.append(problem)
    raise_all(problems)


def read_table(path: Path) -> Table:
    """Reads a table without jax; kernels and their options are not checked.

    Raises:
        ConfigError: `tune.no-table`, `tune.old-table`.
    """
    try:
        table = config_store.load(path)
    except ValueError as problem:
        raise _broken(path, problem) from None
    if table is None:
        raise ConfigError("tune.no-table", "there is no tuning table of this name.", where=str(path))
    return table


def check_table(path: Path) -> None:
    """Checks that an existing table can be continued on this device, before measuring.

    Raises:
        ConfigError: `tune.old-table`, `tune.other-device`.
    """
    from pallas_kernels.tuning import store

    try:
        table = store.load(path)
    except ValueError as problem:
        raise _broken(path, problem) from None
    if table is not None:
        _check_device(path, table, fix="--out with the name of a new file")


def share_table(to: Path) -> Table:
    """Writes what was measured on this device into a file for others: times, versions and the device.

    Raises:
        ConfigError: `tune.nothing-measured`, `tune.old-table`, `tune.other-device`.
    """
    from pallas_kernels.device import device_kind
    from pallas_kernels.tuning import store

    path = table_path(device_kind())
    if not path.exists():
        raise ConfigError(
            "tune.nothing-measured",
            f"nothing was measured on this {device_kind()} yet.",
            where=str(path),
            fix="lorafusion tune jobs.yaml, and then share",
        )
    check_table(path)
    table = read_table(path)
    store.save(table, to)
    return table


def take_table(file: Path) -> Path:
    """Makes a file that somebody shared this machine's table; returns where it lies now.

    Raises:
        ConfigError: `tune.no-table`, `tune.old-table`, `tune.other-device`, `tune.table-exists`.
    """
    from pallas_kernels.device import device_kind
    from pallas_kernels.tuning import store

    _check_device(file, read_table(file), fix="lorafusion tune jobs.yaml measures this device")
    check_table(file)
    path = table_path(device_kind())
    if path.exists():
        raise ConfigError(
            "tune.table-exists",
            "this machine has a table of its own, which the file would replace.",
            where=str(path),
            fix=f"rm {path}, and repeat; lorafusion tune --share FILE keeps a copy of it",
        )
    store.save(read_table(file), path)
    return path


def _check_name(path: Path, table: Table) -> None:
    if path.name != config_store.file_name(table.device):
        raise ConfigError(
            "tune.other-device",
            f"this table holds times of {table.device}, and its name stands for another device.",
            where=str(path),
            fix=f"rm {path}; lorafusion tune --use FILE checks a file that somebody sent",
        )


def _check_device(path: Path, table: Table, *, fix: str) -> None:
    from pallas_kernels.device import device_kind

    if table.device != device_kind():
        raise ConfigError(
            "tune.other-device",
            f"this table holds times of {table.device}, and this device is {device_kind()}.",
            where=str(path),
            fix=fix,
        )


def _broken(path: Path, problem: ValueError) -> ConfigError:
    return ConfigError(
        "tune.old-table",
        "this is not a table of this version's kernels.",
        where=str(path),
        why=str(problem.__cause__ or problem),
        fix=f"rm {path} and tune again",
    )
