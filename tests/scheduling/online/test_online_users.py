"""Users are protected from each other: floods of short jobs, patience, shares of time on one GPU."""

from dataclasses import replace

import pytest
from more_cases import nightly

from scheduling import PlanError
from scheduling.online import (
    ClusterState,
    Decision,
    Job,
    JobState,
    Mesh,
    Ours,
    Rates,
    User,
    UserState,
    Worker,
    check_decisions,
    simulate_cluster,
)
from scheduling.online.patience import PATIENCE, fair_times_s, owed_s, step_cost, users_above_share, work_ahead_s
from scheduling.online.result import fair_finishes_s

RATES = Rates()
KIND = ("h200", 140.0)
MODEL = Job("model", "ann", "llama-3.1-8b", 0.0, [900, 500, 700], 8, 1000)
STEP = RATES.best_isolated_rate(MODEL, KIND)


def lasting(name, user, seconds, arrival_s=0.0):
    """A job of so many GPU-seconds of isolated work."""
    steps = round(seconds / STEP.gpu_s(1))
    return replace(MODEL, name=name, user=user, steps=steps, arrival_s=arrival_s)


@pytest.mark.parametrize(("gpus", "flood"), [(4, 100), nightly(8, 200)])
def test_a_flood_of_short_jobs_does_not_hold_back_another_user(gpus, flood):
    """Ann sends many jobs of six minutes at once, bob one every half an hour. They took nine times as long in turn."""
    jobs = [lasting(f"a{i}", "ann", 360.0) for i in range(flood)]
    jobs += [lasting(f"b{i}", "bob", 360.0, 60.0 + 1800.0 * i) for i in range(5)]
    result = simulate_cluster(jobs, [Worker("host0", gpus)], rates=RATES)
    alone_s = 360.0 / STEP.mesh.gpus + RATES.changes.open_s(MODEL.shape)
    took = [result.jct_s[f"b{i}"] for i in range(5)]
    assert max(took) <= 2 * alone_s
    assert result.refusals == ()


@pytest.mark.parametrize(("gpus", "flood"), [(4, 350), nightly(8, 700)])
def test_long_jobs_start_while_another_user_floods_the_cluster(gpus, flood):
    """Ann's short jobs last for nine hours. Bob's jobs of three hours come at minute 10."""
    jobs = [lasting(f"a{i}", "ann", 360.0) for i in range(flood)]
    jobs += [lasting(f"b{i}", "bob", 3 * 3600.0, 600.0) for i in range(max(1, gpus // 2))]
    result = simulate_cluster(jobs, [Worker("host0", gpus)], rates=RATES)
    assert min(result.start_s[job.name] for job in jobs if job.user == "bob") <= 3600.0
    assert max(result.user_ratio.values()) <= 1.5
    assert result.refusals == ()


@pytest.mark.parametrize("wide", [13, 15])
def test_a_sweep_of_wide_jobs_does_not_hold_back_another_users_only_job(wide):
    """Ann's jobs would fill all GPUs more than three times. Bob's waited until its patience ended, 3.6 fair times."""
    tall = replace(MODEL, base="llama-3.1-70b")
    steps = round(6000.0 / RATES.best_isolated_rate(tall, KIND).gpu_s(1))
    jobs = [replace(tall, name=f"a{i}", steps=steps) for i in range(wide)] + [lasting("b", "bob", 850.0, 600.0)]
    result = simulate_cluster(jobs, [Worker("host0", 8)], rates=RATES)
    assert result.user_ratio["bob"] <= 1.6
    assert result.refusals == ()


def state_of(*jobs, users=(), gpus=8, now=0.0):
    return ClusterState(
        time_s=now,
        workers={"h": Worker("h", gpus)},
        jobs={job_state.job.name: job_state for job_state in jobs},
        users={user.user.name: user for user in users},
    )


def cost_of(job):
    return step_cost(RATES, job, ((KIND, 8),))


def test_the_fair_time_counts_the_users_own_work_and_its_share():
    jobs = [JobState(lasting("a", "ann", 800.0), ahead_s=4000.0), JobState(lasting("b", "bob", 9000.0))]
    state = state_of(*jobs, users=[UserState(User("ann")), UserState(User("bob", 3.0))])
    fair = fair_times_s(state, cost_of)
    assert fair["a"] == pytest.approx(4800.0 / 2, rel=0.01)  # a quarter of eight GPUs
    assert fair["b"] == pytest.approx(9000.0 / min(6, STEP.mesh.gpus), rel=0.01)
    assert work_ahead_s(state, "bob", 0.0, RATES) == pytest.approx(9000.0, rel=0.01)


def test_users_are_above_their_share_only_beside_others():
    """Groups do more work than isolated jobs, so a user alone may receive more than its share."""
    jobs = [JobState(lasting("a", "ann", 800.0)), JobState(lasting("b", "bob", 800.0))]
    greedy, modest = UserState(User("ann"), got=9000.0, entitled=5000.0), UserState(User("bob"), 1000.0, 5000.0)
    assert users_above_share(owed_s(state_of(*jobs, users=[greedy, modest]))) == {"ann"}
    assert users_above_share(owed_s(state_of(jobs[0], users=[greedy, modest]))) == set()
    assert users_above_share(owed_s(state_of(*jobs))) == set()


def opened(name):
    return Decision(
        kind="open", group="h:0", base="llama-3.1-8b", worker="h", gpus=(0,), mesh=Mesh(1, 1, 4096), members=(name,)
    )


@pytest.mark.parametrize(("waited", "allowed"), [(0.97, True), (1.03, False)])
def test_the_checker_knows_how_long_a_job_may_wait(waited, allowed):
    """Bob's job came first. Its patience is a multiple of its fair time, and no other number."""
    jobs = [JobState(lasting("b", "bob", 800.0)), JobState(lasting("a", "ann", 800.0, 10.0), at_s=10.0)]
    fair_s = fair_times_s(state_of(*jobs, gpus=1), cost_of)["b"]
    now = waited * PATIENCE * fair_s
    state = state_of(*jobs, gpus=1, now=now)
    assert (PATIENCE, fair_s) == (4.0, pytest.approx(1600.0, rel=0.01))
    if allowed:
        check_decisions(state, [opened("a")], RATES, Ours(RATES), now)
    else:
        with pytest.raises(PlanError, match="a starts while b has waited"):
            check_decisions(state, [opened("a")], RATES, Ours(RATES), now)
        rich = [
            UserState(User("bob"), got=9000.0, entitled=1000.0),
            UserState(User("ann"), got=1000.0, entitled=9000.0),
        ]
        above = replace(state, users={user.user.name: user for user in rich})
        check_decisions(above, [opened("a")], RATES, Ours(RATES), now)


def test_a_fair_cluster_gives_every_user_a_share():
    """Ann's two jobs and bob's one on one GPU: bob has half of it until he ends; ann runs her shorter job first."""
    jobs = [lasting("long", "ann", 3000.0), lasting("short", "ann", 1000.0), lasting("bob", "bob", 1500.0)]
    isolated = {job.name: RATES.best_isolated_rate(job, KIND, 1) for job in jobs}
    users = {name: User(name) for name in ("ann", "bob")}
    finish = fair_finishes_s(jobs, isolated, users, 1)
    assert finish == pytest.approx({"short": 2000.0, "bob": 3000.0, "long": 5500.0}, rel=0.01)


def test_two_jobs_may_share_one_gpu():
    """Each is compared with half of the GPU's time. On a share of its own it would train half as fast as alone."""
    members = [lasting("a", "ann", 800.0), lasting("b", "bob", 800.0)]
    rate = RATES.group(members, KIND, 1)
    assert rate.within_bounds
    alone = 1 / RATES.isolated_rate(members[0], KIND, 1).step_s
    assert RATES.fair_steps_per_s(members[0], KIND, 0.5) == pytest.approx(alone / 2)
    assert rate.slowdowns == pytest.approx([alone / 2 / steps for steps in rate.steps_per_s])


@pytest.mark.parametrize(
    ("users", "each", "minutes", "every_s", "hours", "gpus"),
    [
        (4, 12, 24.0, 20.0, 1.0, 4),  # the small user's one job asks for more than a fifth of four GPUs
        (7, 6, 40.0, 20.0, 2.0, 8),
        nightly(6, 25, 25.0, 60.0, 1.5, 8),
        nightly(4, 40, 10.0, 15.0, 1.0, 4),
        nightly(5, 30, 18.0, 30.0, 2.0, 8),
    ],
)
def test_users_who_flood_a_cluster_together_do_not_hold_back_a_small_one(users, each, minutes, every_s, hours, gpus):
    jobs = [lasting(f"u{i}", f"u{i % users}", 60.0 * minutes, every_s * i) for i in range(users * each)]
    jobs.append(lasting("small", "zed", 3600.0 * hours, 600.0))
    result = simulate_cluster(jobs, [Worker("host0", gpus)], rates=RATES)
    assert result.jct_s["small"] <= 1.5 * result.isolated["small"].step_s * jobs[-1].steps
    assert max(result.user_ratio.values()) <= 1.5
    assert result.refusals == ()
