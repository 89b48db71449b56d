"""A job as an object: read from a file or a dictionary, checked, printed as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lorafusion_jax.api.arguments import names_unknown
from lorafusion_jax.api.shown import Shown
from lorafusion_jax.config.data_sources import DataSource, is_file, names
from lorafusion_jax.config.from_files import expand_files
from lorafusion_jax.config.job_checks import ineffective
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.overrides import unreached
from lorafusion_jax.config.read import read_source, source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.sources import shown_source, store_rows
from lorafusion_jax.report.console import plain_table, say, warn
from lorafusion_jax.report.format import rate, sizes

UNNAMED = "run"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Job(Shown):
    """A checked job. It prints as a table of its adapters.

    Args:
        config: every setting, defaults included.
        name: of the job file; the default name of the run folder.
        notes: settings that have no effect.
    """

    config: JobConfig
    name: str = UNNAMED
    notes: tuple[str, ...] = ()

    def _show(self, console: Console) -> None:
        batch, mesh = self.config.batch, self.config.mesh
        say(
            console,
            f"job {self.name}  ·  base {Path(self.config.base.model).name}  ·  "
            f"capacity {sizes(batch.sizes)} tokens  ·  {mesh.stages} × {mesh.replicas} devices\n",
        )
        table = plain_table(("adapter", "data"), ("rank", "alpha", "dropout", "lr", "optimizer", "global batch"))
        for adapter in self.config.adapters:
            lora, optim = adapter.lora, adapter.optim
            table.add_row(
                adapter.name,
                names([DataSource(path=_short(source.path)) for source in adapter.data.train]),
                f"{lora.rank}",
                f"{lora.alpha:g}",
                f"{lora.dropout:g}",
                rate(optim.lr),
                optim.name,
                f"{adapter.global_samples}",
            )
        console.print(table)
        warn(console, self.notes)


@names_unknown
def load_job(source: str | Path | Mapping[str, Any], overrides: str | Sequence[str] = ()) -> Job:
    """Reads and checks a job.

    Args:
        source: job file, or a dictionary with the same keys. Paths in a dictionary are relative to the current folder.
            `data.train` and `data.eval` of a dictionary may be rows: a list of dictionaries, another iterable or a
            function that returns one; in a list of sources, `{"rows": …, "weight": 2}`. They are stored in a file of
            the user's cache, so that a run is resumed with the same rows.
        overrides: settings as on the command line, `["train.max_steps=20", "adapters.law.optim.lr=1e-4"]`.

    Raises:
        ConfigError, ErrorList: all mistakes, as `lorafusion check` reports them.

    >>> law = {"name": "law", "data": {"train": "law.jsonl"}}
    >>> job = load_job({"base": {"model": "models/llama"}, "adapters": [law]})
    >>> job.config.adapters[0].lora.rank
    16
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    job_source = source_of(_with_stored_rows(source)) if isinstance(source, Mapping) else read_source(Path(source))
    job_source = expand_files(job_source)
    config = parse_config(job_source, overrides)
    name = UNNAMED if isinstance(source, Mapping) else Path(source).stem
    return Job(config=config, name=name, notes=(*unreached(job_source, overrides), *ineffective(config)))


def job_of(job: Job | str | Path | Mapping[str, Any]) -> Job:
    """Returns the job, read from a file or a dictionary if necessary."""
    return job if isinstance(job, Job) else load_job(job)


def _short(path: str) -> str:
    return shown_source(Path(path).name, Path(path)) if is_file(path) else path


def _with_stored_rows(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The job with a file for all rows that it holds.

    Raises:
        DataError: `data.bad-row`, `data.empty-file`.
    """
    job_of_files, adapters = _with_files(job), job.get("adapters")
    if isinstance(adapters, list | tuple):
        job_of_files = {**job_of_files, "adapters": [_with_files(entry) for entry in adapters]}
    return job_of_files


def _with_files(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or not isinstance(data := entry.get("data"), Mapping):
        return entry
    return {**entry, "data": {**data, **{key: _stored(data[key]) for key in ("train", "eval") if key in data}}}


def _stored(value: Any) -> Any:
    """The value of data.train with files for its rows."""
    if isinstance(value, Mapping):
        if "rows" not in value:
            return value
        path = {"path": str(store_rows(_rows_of(value["rows"])))}
        return path | {key: value[key] for key in value if key != "rows"}
    if isinstance(value, list | tuple):
        of_sources = any(not isinstance(item, Mapping) or {"path", "source", "rows"} & item.keys() for item in value)
        return [_stored(item) for item in value] if of_sources or not value else str(store_rows(value))
    if callable(value) or (isinstance(value, Iterable) and not isinstance(value, str)):
        return str(store_rows(_rows_of(value)))
    return value


def _rows_of(rows: Any) -> Any:
    return rows() if callable(rows) else rows
