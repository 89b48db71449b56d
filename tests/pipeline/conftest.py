"""Jobs of four different adapters on five layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mixed import ADAPTERS, write_mixed_job

from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig


@pytest.fixture(autouse=True)
def _quick(kept_programs):
    """Every test here runs programs of a tiny model."""


@pytest.fixture
def mixed_job(tmp_path, deep_base) -> Callable[..., JobConfig]:
    """mixed_job(tied=True, **sections) → JobConfig of four different adapters on five layers."""

    def make(tied: bool = True, names=tuple(ADAPTERS), **sections):
        return load_config(write_mixed_job(tmp_path, deep_base(tied), names, **sections))

    return make
