"""Snapshots: what they hold, and how much of it is transferred at a time."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.session import device_copy, snapshot
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.state import gather, states_of

PART = 512  # bytes; the largest array has ten times as many


@pytest.fixture
def session(mixed_job, monkeypatch):
    monkeypatch.setattr(device_copy, "PART", PART)
    few = ("adapters.med.lora.targets=[q_proj]", "adapters.med.lora.rank=4")
    config = mixed_job(names=("law", "med"), held_out=(), overrides=few, mesh={"stages": 2, "data": 2})
    opened = Session.open(config, prepare(config))
    opened.start_all({})
    opened.finish_loading()
    yield opened
    opened.close()


def test_a_copy_in_parts_holds_the_state_of_its_moment(session, monkeypatch):
    stages = session.stages
    assert any(leaf.is_fully_replicated for leaf in jax.tree.leaves(stages[0].lora))
    assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(stages[0].sums))
    for stage in stages:
        stage.sums = jax.tree.map(counted, stage.sums)
        stage.optimizers = jax.tree.map(counted, stage.optimizers)
    arrays = gather(stages, Links([stage.mesh for stage in stages]))
    expected = states_of(arrays, session.index, dict.fromkeys(session.names, (0, "")))
    taken = session.snapshot()
    for stage in stages:
        jax.tree.map(lambda leaf: leaf.delete(), [stage.sums, stage.optimizers, stage.lora])
    transferred = []
    transfer = device_copy._transfer

    def noted(group):
        transferred.append(sum(data.nbytes for data, _, _ in group))
        transfer(group)

    monkeypatch.setattr(device_copy, "_transfer", noted)
    for name, state in taken.states().items():
        ours, theirs = [
            [one.weights, one.optimizer, one.sums, one.totals, one.alive] for one in (state, expected[name])
        ]
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert max(transferred) < 2 * PART
    # weights and optimizer states are on both replicas, and sums differ: each byte is transferred once
    arrays = [
        getattr(stage, name) for stage in stages for name in (*snapshot.CHANGING, "optimizers") if name != "alive"
    ]
    assert sum(transferred) - stages[0].alive.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    for name, state in expected.items():
        jax.tree.map(np.testing.assert_array_equal, taken.adapter(name), state.weights)


def counted(leaf: jax.Array) -> jax.Array:
    """An array of the same form whose elements all differ."""
    return jax.device_put(np.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), leaf.sharding)
