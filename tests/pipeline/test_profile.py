"""Times of a stage are those of its passes alone, taken while the others work, too."""

import threading
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixed import write_mixed_job

from lorafusion_jax.config import load_config
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import RunError
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.session import dry_runs, profile
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.base import load_stages
from lorafusion_jax.session.dry_runs import time_passes
from lorafusion_jax.session.move import to_stage, transfer

PAUSE_S = 0.25


def test_making_what_other_stages_would_send_is_not_timed(monkeypatch):
    now = [0.0]

    def slow(*arguments):
        now[0] += PAUSE_S
        return jnp.zeros(2)

    def quick(*arguments):
        return jnp.zeros(2)

    inner = SimpleNamespace(embed=None, head=None)
    middle = SimpleNamespace(weights=inner, forward=quick, backward=quick)
    for draw in ("noise", "gradient_noise"):
        monkeypatch.setattr(dry_runs, draw, slow)
    monkeypatch.setattr(dry_runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert time_passes(middle, None) == (0.0, 0.0)
    middle.forward = slow
    assert time_passes(middle, None) == (PAUSE_S, 0.0)


@pytest.fixture(scope="module")
def stages(tmp_path_factory, deep_base):
    """Three stages, each with the microbatch of a plan that has the most padding."""
    folder = tmp_path_factory.mktemp("job")
    config = load_config(write_mixed_job(folder, deep_base(True), ("law",), (), mesh={"stages": 3}))
    prepared, specs = prepare(config), adapter_specs(config)
    plan = plan_training(config, prepared)
    batches = Batches.of_job(config, prepared, plan, range(1))
    filled = [rows for rows in map(batches.of, range(plan.num_slots)) if (rows.row_adapter >= 0).any()]
    rows = max(filled, key=lambda rows: (rows.row_adapter < 0).sum())
    loaded = load_stages(config, prepared, specs)
    first = loaded[0].first_lora()
    for stage in loaded:
        stage.start(first)
    return [(stage, to_stage(rows, stage.mesh)) for stage in loaded]


@pytest.fixture
def middle(stages):
    """The second of three stages: others send it activations and gradients."""
    return stages[1]


def test_stages_are_timed_on_numbers_that_draw_power(middle):
    stage, batch = middle
    padding = np.asarray(batch.row_adapter) < 0
    assert padding.any()
    for noise in (dry_runs.noise(stage, batch), dry_runs.gradient_noise(stage, batch)):
        assert noise.shape == (*batch.tokens.shape, stage.parts.model.hidden_size)
        assert noise.dtype == stage.parts.dtype
        assert 0.9 < np.asarray(noise, np.float32)[~padding].std() < 1.1


def test_padding_draws_as_little_power_as_in_a_run(middle):
    """Else plans with much padding, such as those of other orders, would be predicted to be slower than they are."""
    stage, batch = middle
    padding = np.asarray(batch.row_adapter) < 0
    activations, gradients = (
        np.asarray(draw(stage, batch))[padding] for draw in (dry_runs.noise, dry_runs.gradient_noise)
    )
    assert len(activations) > 1
    assert (activations == activations[0]).all()
    assert np.abs(activations[0]).max() > 0
    assert not gradients.any()


def test_padding_rows_of_a_run_are_alike_and_have_no_gradient(stages):
    (first, rows), (middle, middle_rows), (last, last_rows) = stages
    sent = first.forward(0, rows, None)
    passed = middle.forward(0, middle_rows, transfer(sent, middle.mesh))
    last.forward(0, last_rows, transfer(passed, last.mesh))
    gradient = last.backward(0, None)
    padding = np.asarray(rows.row_adapter) < 0
    for activations in (np.asarray(sent)[padding], np.asarray(passed)[padding]):
        np.testing.assert_allclose(
            activations, np.broadcast_to(activations[0], activations.shape), rtol=1e-4, atol=1e-6
        )
    assert np.asarray(gradient)[~padding].any()
    assert not np.asarray(gradient)[padding].any()


def test_a_stage_does_not_rest_between_timed_passes(middle):
    """A GPU that waits for a compiler cools, and is faster after that than in a run."""
    stage, batch = middle
    time_passes(stage, batch)
    compiled = []

    def listen(event, seconds, **_):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda: jnp.zeros(3))()  # is noticed
        assert compiled
        compiled.clear()
        time_passes(stage, batch)
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_timing_a_step_leaves_weights_as_they_are(middle):
    """NaNs draw little power: whatever is timed after they came into the weights looks faster than it is."""
    stage, batch = middle
    time_passes(stage, batch)  # some gradients are zero: B is
    before = jax.tree.map(np.asarray, stage.lora)
    assert profile._update_seconds(stage, 2) > 0
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, stage.lora))


LOADS = [profile.Load(None, 128, squares) for squares in (4096, 16384)]  # type: ignore[arg-type]


@pytest.fixture
def profiled(monkeypatch):
    """Profiles stages that do nothing but call what is given."""
    monkeypatch.setattr(profile, "time_passes", lambda stage, batch: stage.time_passes(batch))
    monkeypatch.setattr(profile, "to_stage", lambda rows, mesh: rows)
    monkeypatch.setattr(profile, "_update_seconds", lambda stage, repeats: 0.0)
    monkeypatch.setattr(profile, "_transfer_seconds", lambda stages, load, repeats: 0.0)
    return lambda *passes: profile.profile_stages(
        [SimpleNamespace(mesh=None, time_passes=time_passes) for time_passes in passes], LOADS
    )


def test_stages_are_timed_side_by_side(profiled):
    met = threading.Barrier(2, timeout=300)

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
