"""Adapters that join again and again leave nothing of the stages before them."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
import small_jobs

from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.session import session, stage_state
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.release import release_unused
from lorafusion_jax.session.session import Session

NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture
def join(tmp_path, tiny_base, monkeypatch):
    """join(name) → the next adapter is in a session that began with the first one."""
    monkeypatch.setattr(stage_state, "StagePrograms", StagePrograms)  # without those that other tests share
    rows = small_jobs.write_rows(tmp_path, "rows", 2, longest=4)
    entries = [{"name": name, "data": {"train": rows}} for name in NAMES]
    config = load_config(small_jobs.write_job(tmp_path, tiny_base, entries, lora={"rank": 2, "targets": ["q_proj"]}))
    prepared = prepare(config)
    opened = Session.open(select_adapters(config, NAMES[:1]), prepared)

    def add(name: str) -> None:
        opened.add(select_adapters(config, NAMES[: NAMES.index(name) + 1]), prepared, {})
        opened.compile_reads()

    opened.start_all({})
    opened.finish_loading()
    yield add
    opened.close()


def test_programs_and_arrays_of_earlier_stages_are_deleted(join):
    programs, arrays = [], []
    for name in NAMES[1:]:
        join(name)
        programs.append(len(jax.devices()[0].client.live_executables()))
        arrays.append(len(jax.live_arrays()))
    assert programs == programs[:1] * len(programs)
    assert len(set(np.diff(arrays))) == 1  # those of the new adapter, as many as of the one before it


def test_caches_are_cleared_now_and_then(join, monkeypatch):
    monkeypatch.setattr(session, "ADDITIONS_IN_CACHES", 2)
    function = jax.jit(lambda x: x + 1)
    cache_sizes = []
    for name in NAMES[1:4]:
        function(1.0)
        join(name)
        cache_sizes.append(function._cache_size())
    assert cache_sizes == [1, 0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries return memory by themselves")
def test_freed_memory_goes_back_to_the_system():
    blocks = [b"x" * 100_000 for _ in range(600)]
    last = blocks[-1]  # the heap ends here, so what is freed below stays in it
    del blocks
    before = resident_mb()
    release_unused()
    assert before - resident_mb() > 40
    assert last


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6
