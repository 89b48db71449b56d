"""The current settings, data and plan of a run. They change together, at a drained slot."""

from __future__ import annotations

from dataclasses import dataclass

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from scheduling import Plan


@dataclass(slots=True, kw_only=True)
class Job:
    """Shared by all parts of a run. Only `Revisions` changes it."""

    config: JobConfig
    prepared: Prepared
    plan: Plan
