"""Snapshots: what they hold, and how much of it is transferred at a time."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.pipeline import snapshot
from lorafusion_jax.pipeline.session import Session
from lorafusion_jax.pipeline.state import gather

PART = 512  # bytes; the largest array has ten times as many


@pytest.fixture
def session(mixed_job, monkeypatch):
    monkeypatch.setattr(snapshot, "PART", PART)
    config = mixed_job(names=("law", "med"), held_out=(), mesh={"stages": 2, "data": 2})
    opened = Session.open(config, prepare(config))
    opened.start({})
    opened.finish_loading()
    yield opened
    opened.close()


def test_a_copy_in_parts_holds_the_state_of_its_moment(session, monkeypatch):
    stages = session._stages
    for stage in stages:
        stage.sums = jax.tree.map(counted, stage.sums)
        stage.optimizers = jax.tree.map(counted, stage.optimizers)
    expected = gather(stages)
    taken = session.snapshot()
    for stage in stages:
        jax.tree.map(lambda leaf: leaf.delete(), [stage.sums, stage.optimizers, stage.lora])
    transferred = []
    whole = snapshot.to_host
    monkeypatch.setattr(snapshot, "to_host", lambda part: (transferred.append(part), whole(part))[1])
    found = taken.state()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert max(map(snapshot._device_bytes, transferred)) < 2 * PART
    assert any(part.shape[0] == 2 and len(part.sharding.device_set) == 2 for part in transferred)  # of both replicas
    for name, own in expected["lora"].items():
        jax.tree.map(np.testing.assert_array_equal, taken.adapter(name), own)


def counted(leaf: jax.Array) -> jax.Array:
    """An array of the same form whose elements all differ."""
    return jax.device_put(np.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), leaf.sharding)
