"""A job as an object: read from a file or a dictionary, checked, printed as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lorafusion_jax.api.shown import Shown
from lorafusion_jax.config.data_sources import DataSource, names
from lorafusion_jax.config.job_checks import ineffective
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.overrides import unreached
from lorafusion_jax.config.read import read_source, source_of
from lorafusion_jax.config.schema import JobConfig
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
                names([DataSource(path=Path(s.path).name) for s in adapter.data.train]),
                f"{lora.rank}",
                f"{lora.alpha:g}",
                f"{lora.dropout:g}",
                rate(optim.lr),
                optim.name,
                f"{adapter.global_samples}",
            )
        console.print(table)
        warn(console, self.notes)


def load_job(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Job:
    """Reads and checks a job.

    Args:
        source: job file, or a dictionary with the same keys. Paths in a dictionary are relative to the current folder.
        overrides: settings as on the command line, `["train.max_steps=20", "adapters.law.optim.lr=1e-4"]`.

    Raises:
        ConfigError, ErrorList: all mistakes, as `lorafusion check` reports them.

    >>> law = {"name": "law", "data": {"train": "law.jsonl"}}
    >>> job = load_job({"base": {"model": "models/llama"}, "adapters": [law]})
    >>> job.config.adapters[0].lora.rank
    16
    """
    job_source = source_of(source) if isinstance(source, Mapping) else read_source(Path(source))
    config = parse_config(job_source, overrides)
    name = UNNAMED if isinstance(source, Mapping) else Path(source).stem
    return Job(config=config, name=name, notes=(*unreached(job_source, overrides), *ineffective(config)))


def job_of(job: Job | str | Path | Mapping[str, Any]) -> Job:
    """Returns the job, read from a file or a dictionary if necessary."""
    return job if isinstance(job, Job) else load_job(job)
