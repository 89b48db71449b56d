"""Costs as they are: saves, evaluations, loads of several sessions, and jobs that end otherwise than planned."""

from dataclasses import replace

import pytest

from scheduling import PlanError
from scheduling.online import ChangeCosts, Decision, End, Fault, Job, Mesh, Rates, Worker, simulate_cluster

KIND = ("h200", 140.0)
RATES = Rates()
MESH = Mesh(1, 1, 3072)
LAW = Job("law", "ann", "mistral-7b", 0.0, [640, 1200, 380], 6, 4000)


class Script:
    """Makes the decisions of a table of times."""

    def __init__(self, table):
        self.table = dict(table)

    def decide(self, state, now):
        return self.table.pop(now, [])


def group(kind="open", gpu=0, members=("law",), worker="box", mesh=MESH):
    return Decision(
        kind=kind, group=f"{worker}:{gpu}", base="mistral-7b", worker=worker, gpus=(gpu,), mesh=mesh, members=members
    )


def once(*decisions):
    return Script({0.0: list(decisions)})


def steps_per_s(*jobs, rates=RATES, mesh=MESH):
    return rates.formed(jobs, KIND, mesh).steps_per_s


@pytest.mark.parametrize(("save_s", "every_s"), [(7.0, 100.0), (30.0, 90.0)])
def test_saves_take_their_time_from_training(save_s, every_s):
    """A save of save_s in every interval: alone, in groups that mix, and in groups that alternate."""
    free, paid = Rates(ChangeCosts(save_s=0.0)), Rates(ChangeCosts(save_s=save_s, checkpoint_s=every_s))
    left = 1 - save_s / every_s
    med = replace(LAW, name="med", lengths=[900])
    for members in ((LAW,), (LAW, med)):
        assert steps_per_s(*members, rates=paid) == pytest.approx(
            [left * steps for steps in steps_per_s(*members, rates=free)]
        )
        alternating = [rates.alternating_on_mesh(members, KIND, MESH).tokens_per_s for rates in (paid, free)]
        assert alternating[0] == pytest.approx(left * alternating[1])
    isolated = [rates.isolated_rate(LAW, KIND, 2).step_s for rates in (paid, free)]
    assert isolated[0] == pytest.approx(isolated[1] / left)


@pytest.mark.parametrize("mesh", [MESH, Mesh(1, 2, 3072), Mesh(4, 1, 2048)])
def test_an_evaluation_is_forward_passes_for_which_the_group_stops(mesh):
    """50 000 held-out tokens after every 40 steps of one job; the other waits as well."""
    tested, med = replace(LAW, eval_every=40, eval_tokens=50_000), replace(LAW, name="med", lengths=[900])
    plain, evaluated = steps_per_s(LAW, med, mesh=mesh), steps_per_s(tested, med, mesh=mesh)
    cost, profile = RATES._cost(LAW, KIND, mesh.stages, False), RATES.profile(LAW)
    slots = -(-50_000 // (mesh.replicas * mesh.capacity_tokens)) + mesh.stages - 1
    slot_s = cost.seconds(mesh.capacity_tokens, mesh.capacity_tokens * profile.squares)
    stop_s = slots * slot_s * cost.forward / 40
    assert 0.4 < cost.forward < 0.6  # no gradient of frozen weights: backward takes about as long
    assert evaluated == pytest.approx([steps / (1 + plain[0] * stop_s) for steps in plain])
    alone = [steps_per_s(job, mesh=mesh)[0] for job in (LAW, tested)]
    assert 1 / alone[1] == pytest.approx(1 / alone[0] + stop_s)
    taken = RATES.isolated_rate(tested, KIND, 1)
    assert 1 / steps_per_s(tested, mesh=taken.mesh)[0] == pytest.approx(taken.step_s)
    turns = [RATES.alternating_on_mesh([job, med], KIND, mesh).steps_per_s[0] for job in (LAW, tested)]
    assert 1 / turns[1] == pytest.approx(1 / turns[0] + stop_s)


@pytest.mark.parametrize("hosts", [("box", "box"), ("box", "rack")])
def test_sessions_that_open_together_on_one_host_share_its_rate_of_loading(hosts):
    rates = Rates(ChangeCosts(start_s=11.0, load_bytes_per_s=1e9))
    jobs = [LAW, replace(LAW, name="med")]
    policy = once(*(group(gpu=gpu, members=(job.name,), worker=host) for gpu, (job, host) in
                    enumerate(zip(jobs, hosts, strict=True))))  # fmt: skip
    result = simulate_cluster(jobs, [Worker(host, 2) for host in dict.fromkeys(hosts)], policy, rates=rates)
    load_s = 2 * LAW.shape.parameters / 1e9
    assert result.start_s["law"] == pytest.approx(11.0 + load_s)
    assert result.start_s["med"] == pytest.approx(11.0 + load_s * (2 if hosts[0] == hosts[1] else 1))


def test_a_fault_loses_what_a_job_has_trained_since_its_own_last_save():
    """Saves every 70 s of training. That another job comes or ends is no save of the first one."""
    rates = Rates(ChangeCosts(start_s=0.0, load_bytes_per_s=1e15, change_s=0.0, compile_s=0.0, checkpoint_s=70.0))
    short = replace(LAW, name="short", arrival_s=80.0, steps=5)
    again = [group()]
    script = Script({0.0: [group()], 80.0: [group("change", members=("law", "short"))], 120.5: again})
    result = simulate_cluster([LAW, short], [Worker("box", 1)], script, rates=rates, faults=[Fault("box", 120.0, 0.5)])
    assert result.finish_s["short"] < 120.0
    lost_steps = result.accounts.lost_tokens / (LAW.tokens / LAW.steps)
    together = steps_per_s(LAW, short, rates=rates)
    shared_s = 5 / together[1]
    alone_s = 120.0 % 70.0 - shared_s
    assert lost_steps == pytest.approx(shared_s * together[0] + alone_s * steps_per_s(LAW, rates=rates)[0], rel=1e-6)


def test_what_a_job_has_trained_is_saved_when_it_leaves_its_session():
    rates = Rates(ChangeCosts(start_s=0.0, load_bytes_per_s=1e15, change_s=0.0, compile_s=0.0, move_s=0.0))
    ticks = [replace(LAW, name=name, arrival_s=at, steps=1) for name, at in (("t1", 30.0), ("t2", 40.0))]
    script = Script(
        {
            0.0: [group()],
            30.0: [Decision(kind="close", group="box:0")],
            40.0: [group(gpu=1, members=("law",))],
            95.0: [group(members=("law", "t1", "t2"))],
        }
    )
    faults = [Fault("box", 90.0, 5.0)]
    result = simulate_cluster([LAW, *ticks], [Worker("box", 2)], script, rates=rates, faults=faults)
    lost_steps = result.accounts.lost_tokens / (LAW.tokens / LAW.steps)
    assert lost_steps == pytest.approx(50.0 * steps_per_s(LAW, rates=rates)[0], rel=1e-3)
    assert result.preemptions == 1


def test_what_a_job_has_trained_is_saved_when_it_leaves_others_and_comes_back():
    """Its session stays open for the other member, whose own last save is older."""
    rates = Rates(ChangeCosts(start_s=0.0, load_bytes_per_s=1e15, change_s=0.0, compile_s=0.0, move_s=0.0))
    med = replace(LAW, name="med", lengths=[900])
    ticks = [replace(LAW, name=f"t{at}", arrival_s=at, steps=1) for at in (30.0, 40.0)]
    script = Script(
        {
            0.0: [group(members=("law", "med"))],
            30.0: [group("change", members=("med",))],
            40.0: [group("change", members=("law", "med"))],
            95.0: [group(members=("law", "med", "t30.0", "t40.0"))],
        }
    )
    faults = [Fault("box", 90.0, 5.0)]
    result = simulate_cluster([LAW, med, *ticks], [Worker("box", 1)], script, rates=rates, faults=faults)
    together, (alone,) = steps_per_s(LAW, med, rates=rates), steps_per_s(med, rates=rates)
    lost = together[0] * 50.0 * LAW.tokens / LAW.steps
    lost += (together[1] * 80.0 + alone * 10.0) * med.tokens / med.steps
    assert result.accounts.lost_tokens == pytest.approx(lost, rel=1e-3)


@pytest.mark.parametrize("how", ["early", "failed"])
def test_a_job_that_ends_at_a_step_leaves_the_others_to_train_on(how):
    med = replace(LAW, name="med", steps=1500)
    plain = simulate_cluster([LAW, med], [Worker("box", 1)], once(group(members=("law", "med"))), rates=RATES)
    ends = [End(job="law", how=how, step=100)]
    result = simulate_cluster(
        [LAW, med], [Worker("box", 1)], once(group(members=("law", "med"))), rates=RATES, ends=ends
    )
    together, alone = steps_per_s(LAW, med), steps_per_s(med)[0]
    first_s = 100 / together[0]
    assert result.finish_s["law"] - result.start_s["law"] == pytest.approx(first_s)
    assert result.ended == {"law": (how, pytest.approx(100.0))}
    rest_s = (1500 - together[1] * first_s) / alone
    assert result.finish_s["med"] - result.finish_s["law"] == pytest.approx(rest_s)
    assert sorted(result.jct_s) == (["law", "med"] if how == "early" else ["med"])
    tokens = med.tokens + (LAW.tokens / 40 if how == "early" else 0.0)
    assert result.tokens_per_s == pytest.approx(tokens / result.makespan_s)
    assert sum(span.steps for span in result.spans if span.job == "law") == pytest.approx(100.0)
    assert plain.ended == {}
    assert len(result.user_ratio) == len(plain.user_ratio) == 1


def test_a_cancelled_job_frees_its_place_whether_it_waits_or_trains():
    """One GPU: the first job trains until it is cancelled, the second never starts, the third starts at once."""
    jobs = [LAW, replace(LAW, name="second", arrival_s=5.0, steps=9000), replace(LAW, name="third", arrival_s=6.0)]
    ends = [End(job="second", how="cancelled", time_s=50.0), End(job="law", how="cancelled", time_s=100.0)]
    result = simulate_cluster(jobs, [Worker("box", 1)], "fifo", rates=RATES, ends=ends)
    assert {name: end.how for name, end in result.ended.items()} == {"law": "cancelled", "second": "cancelled"}
    assert (result.finish_s["second"], result.finish_s["law"]) == (50.0, 100.0)
    assert "second" not in result.start_s
    trained_s = 100.0 - result.start_s["law"]
    assert result.ended["law"].steps == pytest.approx(trained_s / RATES.best_isolated_rate(LAW, KIND, 1).step_s)
    assert 100.0 < result.start_s["third"] <= 100.0 + RATES.changes.open_s(LAW.shape)
    assert list(result.jct_s) == list(result.finish_time_fairness) == ["third"]


def test_every_policy_ends_a_trace_in_which_jobs_fail_and_are_cancelled():
    jobs = [replace(LAW, name=f"n{i}", user=f"u{i % 3}", arrival_s=40.0 * i, steps=300 + 97 * i) for i in range(14)]
    ends = [
        End(job="n2", how="failed", step=1),
        End(job="n5", how="early", step=450),
        End(job="n9", how="cancelled", time_s=360.0),
        End(job="n11", how="early", step=10**6),  # later than its last step: it never happens
        End(job="n13", how="cancelled", time_s=10**7),
    ]
    for policy in ("ours", "srtf", "tlora", "mlora"):
        result = simulate_cluster(jobs, [Worker("box", 2)], policy, rates=RATES, ends=ends)
        assert sorted(result.ended) == ["n2", "n5", "n9"]
        assert len(result.finish_s) == 14
        assert result.refusals == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: End(job="law", how="failed"), "have a step"),
        (lambda: End(job="law", how="cancelled", step=3), "has a time_s"),
        (lambda: End(job="law", how="early", step=0), "no step of at least 1"),
        (lambda: simulate_cluster([LAW], [Worker("box", 1)], ends=[End(job="x", how="early", step=1)]), "no job"),
        (lambda: simulate_cluster([LAW], [Worker("box", 1)], ends=[End(job="law", how="early", step=1)] * 2), "two"),
        (
            lambda: simulate_cluster(
                [replace(LAW, arrival_s=9.0)], [Worker("box", 1)], ends=[End(job="law", how="cancelled", time_s=8.0)]
            ),
            "before it arrives",
        ),
    ],
)
def test_ends_that_cannot_be_are_refused(make, message):
    with pytest.raises(PlanError, match=message) as caught:
        make()
    assert caught.value.code == "online.end"
