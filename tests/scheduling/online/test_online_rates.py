"""The rate model against simulated plans; memory, slowdowns and shares."""

from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling import simulate
from scheduling.baselines import one_after_another
from scheduling.online import SHAPES, Job, Mesh, ModelShape, Rates, ShapeFacts
from scheduling.online.facts import GIB, stage_bytes, stage_costs
from scheduling.online.joint import pack_together
from scheduling.online.sharing import fair_shares
from scheduling.pipeline import one_forward_one_backward
from scheduling.types import AdapterJob, Limits
from scheduling.window import Cursor, Tail, plan_window

RATES = Rates()
KIND = ("h200", 140.0)


def job(name="law", **changes):
    values = {"user": "ann", "base": "llama-3.1-8b", "arrival_s": 0.0, "lengths": [900, 500, 700, 1100, 300, 650]}
    return Job(**({"name": name, "global_batch": 8, "steps": 1000} | values | changes))


@pytest.mark.parametrize("unseen", [False, True])
def test_groups_train_as_quickly_as_their_plans(benchmark, unseen):
    """The bounds of the benchmark's sixty groups, on ten of another seed; unseen: other lengths than fitted."""
    rows = benchmark.compare_rates(10, seed=5, unseen=unseen)
    slowdowns = sorted(abs(float(error)) for row in rows for error in row["slowdown_errors"].split())
    for errors in (sorted(abs(row["error"]) for row in rows), slowdowns):
        assert mean(errors) <= 0.04
        assert errors[int(0.95 * len(errors)) - 1] <= 0.12


@pytest.mark.parametrize("base", ["llama-3.1-8b", "llama-3.1-70b"])
def test_a_job_alone_trains_as_quickly_as_its_plan(base):
    law = job(base=base, lengths=[900, 500, 700, 1100, 300, 650, 820, 1300] * 4)
    rate = RATES.best_isolated_rate(law, KIND)
    stages, replicas, capacity = rate.mesh
    adapter = AdapterJob("law", law.lengths * 10, law.global_batch)
    plan = one_after_another([adapter], capacity_tokens=capacity, num_stages=stages, data_parallel=replicas)
    recompute = RATES.recomputes([law], KIND, rate.mesh)
    costs = stage_costs(law.shape, "h200", stages, recompute)
    timeline = simulate(plan, costs, program=one_forward_one_backward(plan, flush=True))
    assert rate.step_s == pytest.approx(timeline.duration_s / adapter.num_batches, rel=0.05)


def test_the_slowdown_is_against_the_fair_share_of_the_groups_gpus():
    members = [job("a"), job("b", weight=3.0), job("c", weight=4.0)]
    rate = RATES.group(members, KIND, 8)
    for member, steps, slowdown in zip(members, rate.steps_per_s, rate.slowdowns, strict=True):
        assert slowdown == pytest.approx(RATES.fair_steps_per_s(member, KIND, member.weight) / steps)


def test_members_share_full_microbatches_by_weight():
    """In the fluid model and packed together: batches are so large that each could fill every slot."""
    members = [job("a", lengths=[300], global_batch=200), job("b", lengths=[300], global_batch=200, weight=3.0)]
    for rate in (RATES.on_mesh(members, KIND, Mesh(1, 1, 4096)), RATES.formed(members, KIND, Mesh(1, 1, 4096))):
        assert rate.steps_per_s[1] == pytest.approx(3 * rate.steps_per_s[0], rel=0.1)


@pytest.mark.parametrize("batches", [(8, 2), (16, 1)])
def test_groups_train_as_their_windows_do(batches):
    """Beside small batches, samples nearly as long as a microbatch wait until their job goes first."""
    rng = np.random.default_rng(1)
    long = np.clip(rng.lognormal(np.log(1024), 0.9, 400), 32, 4096).astype(int).tolist()
    short = np.clip(rng.lognormal(5, 0.7, 400), 32, 512).astype(int).tolist()
    members = [job("long", lengths=long, global_batch=batches[0]), job("short", lengths=short, global_batch=batches[1])]
    packed = pack_together(members, Mesh(1, 1, 4096), 96)
    cursors = [Cursor(job=AdapterJob(m.name, list(m.lengths) * 20, m.global_batch)) for m in members]
    tail, tokens = Tail(limits=Limits(capacity_tokens=4096, num_stages=1)), 0.0
    for _ in range(4):
        window = plan_window(cursors, tail, 48)
        cursors, tail, tokens = window.cursors, window.tail, tokens + window.density * 4096 / 4
    assert tokens / 4096 > 0.7
    assert packed.tokens == pytest.approx(tokens, rel=0.06)
    taken = [cursor.batch / 192 for cursor in cursors]
    assert packed.steps == pytest.approx(taken, rel=0.2)


def test_members_take_room_for_their_own_ranks():
    low, high = job("low", rank=4), job("high", rank=64)
    together, *alone = (ShapeFacts().trainable_bytes(jobs, 2) for jobs in ([low, high], [low], [high]))
    assert together == sum(alone)
    assert alone[1] == pytest.approx(16 * alone[0])


def test_a_share_below_the_smallest_mesh_is_a_share_of_its_time():
    tall = job(base="llama-3.1-70b")
    smallest = next(gpus for gpus in (1, 2, 4, 8) if RATES.isolated_rate(tall, KIND, gpus))
    assert smallest > 1
    alone = 1 / RATES.isolated_rate(tall, KIND, smallest).step_s
    assert RATES.fair_steps_per_s(tall, KIND, 0.1) == pytest.approx(alone * 0.1 / smallest)


def test_more_gpus_are_never_slower():
    shares = [0.5, 1, 1.5, 2, 3, 4, 6, 8]
    rates = [RATES.fair_steps_per_s(job(), KIND, share) for share in shares]
    assert rates == sorted(rates)


def test_order_of_members_does_not_matter():
    members = [job("a"), job("b", global_batch=16), job("c", lengths=[400, 300])]
    there, back = RATES.group(members, KIND, 4), Rates().group(members[::-1], KIND, 4)
    assert there.steps_per_s == back.steps_per_s[::-1]
    assert there.mesh == back.mesh


def test_groups_have_higher_density_than_single_jobs():
    """A 70B job alone empties its pipeline at every step; four of them keep it full."""
    members = [job(name, base="llama-3.1-70b") for name in "abcd"]
    alone = RATES.best_isolated_rate(members[0], KIND)
    together = RATES.group(members, KIND, 4)
    alone_per_gpu = members[0].tokens / members[0].steps / alone.step_s / alone.mesh.gpus
    assert together.tokens_per_s / 4 >= 1.4 * alone_per_gpu


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.1, 10)), min_size=1, max_size=8), st.floats(0.01, 500))
def test_fair_shares_use_the_room_and_exceed_no_cap(jobs, room):
    caps, weights = zip(*jobs, strict=True)
    shares = fair_shares(caps, weights, room)
    assert sum(shares) == pytest.approx(min(room, sum(caps)))
    assert all(share <= cap * (1 + 1e-9) for share, cap in zip(shares, caps, strict=True))
    levels = [share / weight for share, weight in zip(shares, weights, strict=True)]
    for level, share, cap in zip(levels, shares, caps, strict=True):
        assert level >= max(levels) * (1 - 1e-9) or share == pytest.approx(cap)


def test_memory_of_a_group_is_within_its_gpus():
    members = [job(name, base="llama-3.1-70b") for name in "abcd"]
    rate = RATES.group(members, KIND, 4)
    needed = RATES.memory_gib(members, KIND, rate.mesh)
    weights = 2 * members[0].shape.parameters / rate.mesh.stages / GIB
    assert weights < needed <= 140
    assert RATES.memory_gib(members, KIND, Mesh(1, 4, 2560)) is None
    assert RATES.on_mesh(members, KIND, Mesh(1, 4, 2560)) is None


def test_recomputing_needs_less_memory_per_token():
    shape = SHAPES["qwen2.5-32b"]
    assert stage_bytes(shape, 1, True).token < stage_bytes(shape, 1, False).token / 2


def test_a_shape_and_its_name_mean_the_same():
    shape = SHAPES["llama-3.1-8b"]
    assert isinstance(shape, ModelShape)
    assert Rates().best_isolated_rate(job(base=shape), KIND) == RATES.best_isolated_rate(job(), KIND)


def test_a_session_may_have_one_capacity_for_all_groups():
    rates, short, long = Rates(capacities=[4096]), job(), job("long", lengths=[6000, 900])
    for members in ([short], [short, job("b", lengths=[2500])]):
        assert rates.group(members, KIND, 4).mesh.capacity_tokens == 4096
    assert rates.best_isolated_rate(short, KIND).mesh.capacity_tokens == 4096
    assert rates.best_isolated_rate(long, KIND) is None  # its longest sample does not fit
    assert rates.isolated_rate(short, KIND, 1).step_s >= RATES.isolated_rate(short, KIND, 1).step_s


def test_rates_take_the_facts_that_they_are_given():
    """8B jobs at the costs of 32B train as fast as 32B jobs; where a token takes more room, fewer fit."""

    class Slow(ShapeFacts):
        def stage_costs(self, job, device, num_stages, recompute):
            return stage_costs(SHAPES["qwen2.5-32b"], device, num_stages, recompute)

    class Wide(ShapeFacts):
        def stage_bytes(self, jobs, num_stages, recompute):
            known = super().stage_bytes(jobs, num_stages, recompute)
            return known._replace(token=(40 if any(job.kind == "dora" for job in jobs) else 1) * known.token)

    wide = [job("b", kind="dora")]
    assert Rates(facts=Wide()).on_mesh([job()], KIND, Mesh(1, 1, 16384)) is not None
    assert Rates(facts=Wide()).on_mesh([job(), *wide], KIND, Mesh(1, 1, 16384)) is None
    assert Rates(facts=Wide()).on_mesh(wide, KIND, Mesh(1, 1, 16384)) is None
    assert RATES.on_mesh(wide, KIND, Mesh(1, 1, 16384)) is not None
    given = Rates(facts=Slow())
    mesh, lengths = Mesh(1, 8, 4096), ([900, 500], [1500, 400])
    small, large = (
        [job(str(index), base=base, lengths=job_lengths) for index, job_lengths in enumerate(lengths)]
        for base in ("llama-3.1-8b", "qwen2.5-32b")
    )
    assert given.on_mesh(small, KIND, mesh).tokens_per_s == RATES.on_mesh(large, KIND, mesh).tokens_per_s
    assert given.on_mesh(small, KIND, mesh).tokens_per_s < RATES.on_mesh(small, KIND, mesh).tokens_per_s / 3
