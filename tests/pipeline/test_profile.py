"""Times of a stage are those of its passes alone, taken while the others work, too."""

import threading
import time
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import RunError
from lorafusion_jax.pipeline import profile
from lorafusion_jax.pipeline.base import load_stages
from lorafusion_jax.pipeline.batches import Batches
from lorafusion_jax.pipeline.move import to_stage
from lorafusion_jax.pipeline.stage import Stage
from lorafusion_jax.planning.training_plan import plan_training

PAUSE_S = 0.2


def test_making_what_other_stages_would_send_is_not_timed():
    def slow(*arguments):
        time.sleep(PAUSE_S)
        return jnp.zeros(2)

    def quick(*arguments):
        return jnp.zeros(2)

    middle = SimpleNamespace(weights=SimpleNamespace(embed=None, head=None), noise=slow, forward=quick, backward=quick)
    Stage.time_passes(middle, None)
    assert max(Stage.time_passes(middle, None)) < PAUSE_S
    middle.forward = slow
    forward, backward = Stage.time_passes(middle, None)
    assert backward < PAUSE_S <= forward


@pytest.fixture
def middle(mixed_job):
    """The second of three stages: others send it activations and gradients."""
    config = mixed_job(mesh={"stages": 3})
    prepared, specs = prepare(config), adapter_specs(config)
    plan = plan_training(config, prepared)
    stages = load_stages(config, prepared, specs)
    stages[1].start(stages[0].first_lora())
    return stages[1], to_stage(Batches(config, prepared, plan, range(1)).of(0), stages[1].mesh)


def test_stages_are_timed_on_numbers_that_draw_power(middle):
    stage, batch = middle
    noise = stage.noise(batch)
    assert noise.shape == (*batch.tokens.shape, stage._parts.model.hidden_size)
    assert noise.dtype == stage._parts.dtype
    assert 0.9 < np.asarray(noise, np.float32).std() < 1.1


def test_a_stage_does_not_rest_between_timed_passes(middle):
    """A GPU that waits for a compiler cools, and is faster after that than in a run."""
    stage, batch = middle
    stage.time_passes(batch)
    compiled = []

    def listen(event, seconds, **_):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda: jnp.zeros(3))()  # is noticed
        assert compiled
        compiled.clear()
        stage.time_passes(batch)
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_timing_a_step_leaves_weights_as_they_are(middle):
    """NaNs draw little power: whatever is timed after they came into the weights looks faster than it is."""
    stage, batch = middle
    stage.time_passes(batch)  # some gradients are zero: B is
    before = jax.tree.map(np.asarray, stage.lora)
    assert profile._update_seconds(stage, 2) > 0
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, stage.lora))


LOADS = [profile.Load(None, 128, squares) for squares in (4096, 16384)]  # type: ignore[arg-type]


@pytest.fixture
def profiled(monkeypatch):
    """Profiles stages that do nothing but call what is given."""
    monkeypatch.setattr(profile, "to_stage", lambda rows, mesh: rows)
    monkeypatch.setattr(profile, "_update_seconds", lambda stage, repeats: 0.0)
    monkeypatch.setattr(profile, "_transfer_seconds", lambda stages, load, repeats: 0.0)
    return lambda *passes: profile.profile_stages(
        [SimpleNamespace(mesh=None, time_passes=time_passes) for time_passes in passes], LOADS
    )


def test_stages_are_timed_side_by_side(profiled):
    met = threading.Barrier(2, timeout=30)

    def taking(seconds):
        def time_passes(batch):
            met.wait()  # for the other stage
            return seconds, 2 * seconds

        return time_passes

    costs = profiled(taking(1.0), taking(3.0))
    assert [stage.forward.seconds(128, 4096) for stage in costs.stages] == pytest.approx([1.0, 3.0])
    assert [stage.backward.seconds(128, 4096) for stage in costs.stages] == pytest.approx([2.0, 6.0])


def test_a_device_that_fails_is_named_by_its_stage(profiled):
    def no_memory(batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB")

    with pytest.raises(RunError, match="no memory left at stage 1") as failed:
        profiled(lambda batch: (1.0, 2.0), no_memory)
    assert failed.value.code == "train.out-of-memory"


def test_what_no_device_is_to_blame_for_is_raised_as_it_is(profiled):
    def broken(batch):
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        profiled(broken, lambda batch: (1.0, 2.0))


def test_several_processes_offer_programs_equally_often_and_in_one_order(profiled, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    offered = []
    profiled(*(lambda batch, number=number: offered.append(number) or (1.0, 2.0) for number in range(2)))
    turns = len(LOADS) * 4  # three repeats, and one before that does not count
    assert offered == [0] * turns + [1] * turns
