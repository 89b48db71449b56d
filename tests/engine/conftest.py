"""One session of streams for a file of their tests; files of live sessions have their own."""

from __future__ import annotations

import shutil

import pytest
from live_sessions import open_session
from small_jobs import two_adapters, write_job, write_rows
from stream_clients import CAPACITY, TARGETS

from lorafusion_jax.api.training import TrainingClient, _Shared
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.session import WindowPlanner
from lorafusion_jax.session.session_thread import SessionThread


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_base) -> JobConfig:
    folder = tmp_path_factory.mktemp("job")
    rows = {name: write_rows(folder, name, 6) for name in ("law", "med")}
    entries = [entry | {"lora": {"rank": 2, "targets": TARGETS}} for entry in two_adapters(rows)]
    base = shutil.copytree(tiny_base, folder / "base")
    return load_config(write_job(folder, base, entries, batch={"capacity_tokens": CAPACITY}))


@pytest.fixture(scope="module")
def session(config):
    opened = open_session(config, {4: 7}, TARGETS, row_targets=1)
    yield opened
    opened.close()


@pytest.fixture
def planner(session) -> WindowPlanner:
    return WindowPlanner(session)


@pytest.fixture(scope="module")
def opened(session, config):
    """A client of `lf.training_client`, which takes over the session: after all tests that drive it by `planner`."""
    shared = _Shared(SessionThread(session), TARGETS, base_directory(config))
    with TrainingClient(shared, rank=4, targets=TARGETS) as client:
        yield client


@pytest.fixture
def client(opened):
    with opened.new_client(rank=4) as fresh:
        yield fresh
