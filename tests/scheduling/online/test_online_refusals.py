"""Bad input raises an error with a code and a message that says what to change."""

import math

import pytest

from scheduling import PlanError
from scheduling.online import (
    Fault,
    Job,
    ModelShape,
    User,
    Worker,
    generate_trace,
    read_trace,
    simulate_cluster,
    write_trace,
)

PUBLIC = "job_id,user,gpu_num,submit_time,state,duration\n"
GOOD = {
    "name": "law", "user": "ann", "base": "llama-3.1-8b", "arrival_s": 0.0, "lengths": [512],
    "global_batch": 8, "steps": 10,
}  # fmt: skip
HOST = [Worker("host0", 8)]


def job(**changes):
    return lambda: Job(**(GOOD | changes))


CASES = {
    "negative time": (job(arrival_s=-1.0), "online.job", "law: arrival_s must be at least 0, not -1.0"),
    "time that is none": (job(arrival_s=math.nan), "online.job", "arrival_s"),
    "unknown base": (job(base="llama-9"), "online.unknown-base", "llama-9"),
    "object that is no base": (job(base=object()), "online.base", "hidden_size"),
    "zero weight": (job(weight=0.0), "online.job", "law: weight must be above 0, not 0.0"),
    "infinite weight": (job(weight=math.inf), "online.job", "weight"),
    "no lengths": (job(lengths=[]), "online.job", "lengths"),
    "length 0": (job(lengths=[5, 0]), "online.job", "lengths"),
    "no steps": (job(steps=0), "online.job", "law: steps must be a whole number of at least 1, not 0"),
    "boolean batch": (job(global_batch=True), "online.job", "global_batch"),
    "bound below 1": (job(max_slowdown=0.9), "online.job", "max_slowdown"),
    "deadline in the past": (job(arrival_s=9.0, deadline_s=3.0), "online.job", "deadline_s"),
    "unknown target": (job(targets=("lm_head",)), "online.job", "lm_head"),
    "no name": (job(name=""), "online.job", "name"),
    "no GPUs": (lambda: Worker("w", 0), "online.worker", "w: gpus"),
    "no memory": (lambda: Worker("w", 1, 0.0), "online.worker", "w: memory_gib"),
    "user without weight": (lambda: User("ann", 0.0), "online.user", "ann: weight must be above 0"),
    "quota of nothing": (lambda: User("ann", 1.0, 0.0), "online.user", "max_gpus"),
    "fault before the start": (lambda: Fault("w", -1.0, 5.0), "online.fault", "start_s"),
    "fault without duration": (lambda: Fault("w", 1.0, 0.0), "online.fault", "duration_s"),
    "shape without layers": (
        lambda: ModelShape(hidden_size=8, intermediate_size=8, num_layers=0, num_heads=1, num_kv_heads=1, vocab_size=8),
        "online.base",
        "num_layers",
    ),
    "two jobs of one name": (lambda: simulate_cluster([Job(**GOOD)] * 2, HOST), "online.duplicate-name", "law"),
    "no workers": (lambda: simulate_cluster([Job(**GOOD)], []), "online.no-workers", "worker"),
    "fault of nobody": (lambda: simulate_cluster([Job(**GOOD)], HOST, faults=[Fault("x", 1, 1)]), "online.fault", "x"),
    "unknown policy": (lambda: simulate_cluster([Job(**GOOD)], HOST, policy="luck"), "online.policy", "luck"),
    "job that fits nowhere": (
        lambda: simulate_cluster([Job(**GOOD | {"base": "llama-3.1-70b"})], [Worker("w", 1)]),
        "online.job-too-large",
        "law fits nowhere",
    ),
    "trace of unknown columns": (lambda: read_trace("a,b\n1,2\n", workers=HOST), "online.trace", "a, b"),
    "trace with a broken line": (
        lambda: read_trace(write_trace([Job(**GOOD)]).replace(",10,", ",ten,"), workers=HOST, where="t.csv"),
        "online.trace",
        "t.csv line 2",
    ),
    "trace without a job": (lambda: read_trace(write_trace([]), workers=HOST), "online.trace", "has no job"),
    "trace with a line that is too short": (
        lambda: read_trace(PUBLIC + "1,ann\n", workers=HOST, where="t.csv"),
        "online.trace",
        "no column 'gpu_num'",
    ),
    "trace with an endless job": (
        lambda: read_trace(PUBLIC + "1,ann,1,0,ENDED,inf\n", workers=HOST, where="t.csv"),
        "online.trace",
        "'inf' is no finite number",
    ),
    "trace with a job without a name": (
        lambda: read_trace(PUBLIC + ",ann,1,0,ENDED,60\n", workers=HOST, where="t.csv"),
        "online.job",
        "t.csv line 2",
    ),
    "trace with more lengths than a cell holds": (
        lambda: read_trace(write_trace([Job(**GOOD | {"lengths": [512] * 40_000})]), workers=HOST, where="t.csv"),
        "online.trace",
        "t.csv line 2",
    ),
    "trace with a bad job": (
        lambda: read_trace(write_trace([Job(**GOOD)]).replace(",10,", ",0,"), workers=HOST, where="t.csv"),
        "online.job",
        "t.csv line 2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    make, code, message = CASES[name]
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.code == code
    assert message in str(caught.value)


def test_own_traces_round_trip():
    jobs = generate_trace("sweeps", jobs=20, workers=HOST, seed=4)
    assert read_trace(write_trace(jobs), workers=HOST) == jobs


@pytest.mark.parametrize(
    "header",
    [
        "jobid,user,submitted_time,duration,gpus",  # Philly
        "job_id,user,gpu_num,submit_time,state,duration",  # Helios and ACME
    ],
)
def test_public_columns_become_jobs_of_the_same_gpu_time(header):
    values = {
        "jobid": "x", "job_id": "x", "user": "ann", "submitted_time": "2020-01-01 00:00:10",
        "submit_time": "2020-01-01 00:00:10", "duration": "7200", "gpus": "4", "gpu_num": "4", "state": "COMPLETED",
    }  # fmt: skip
    rows = [
        values,
        values
        | {"jobid": "y", "job_id": "y", "submitted_time": "2020-01-01 00:01:10", "submit_time": "2020-01-01 00:01:10"},
    ]
    rows.append(values | {"jobid": "cpu", "job_id": "cpu", "gpus": "0", "gpu_num": "0"})
    names = header.split(",")
    jobs = read_trace("\n".join([header, *(",".join(row[name] for name in names) for row in rows)]), workers=HOST)
    assert [(job.name, job.arrival_s) for job in jobs] == [("x", 0.0), ("y", 60.0)]
    result = simulate_cluster(jobs[:1], HOST, policy="fifo")
    spans = [span for span in result.accounts.groups if span.members]
    gpu_s = sum(len(span.gpus) * (span.end_s - span.ready_s) for span in spans)
    assert gpu_s == pytest.approx(4 * 7200, rel=0.02)
