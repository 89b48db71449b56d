"""Thousands of models whose clients are silent: they sleep, cost the others nothing, and come back."""

from __future__ import annotations

import copy
import shutil
import time

import numpy as np
import pytest
from campaigns.service_process import wait_for
from sqlalchemy import select
from training_service import Model, TrainingService

from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.tinker import log

ROWS, COUNT, CALLS, MOST_RATIO = [[1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9]], 4096, 12, 3.0
SESSION = 64  # models of a client


def losses(model):
    return model.result(model.rows(ROWS, forward_only=True))[1]["loss:sum"]


def median_s(model):
    seconds = []
    for _ in range(CALLS):
        began = time.process_time()
        losses(model)
        seconds.append(time.process_time() - began)
    return float(np.median(seconds))


def fall_asleep(service, model, monkeypatch):
    monkeypatch.setattr("lorafusion_jax.serve.tinker.streams.ALIVE_S", 0.2)

    def asleep():
        with service.db.read() as connection:
            return service.service.jobs.get(connection, log.find_model(connection, model.id, None)["job"])["state"]

    wait_for(lambda: asleep() == "paused")
    monkeypatch.undo()


def multiply(service, model):
    """Writes the rows of as many sleeping models as that one, with its state. Returns some of them."""
    made, jobs, models, sessions = [], [], [], []
    with service.db.read() as connection:
        (job, of_model, session) = (
            dict(connection.execute(select(table).where(column == value)).mappings().one())
            for table, column, value in (
                (t.jobs, t.jobs.c.id, log.find_model(connection, model.id, None)["job"]),
                (t.api_models, t.api_models.c.id, model.id),
                (t.api_sessions, t.api_sessions.c.id, model.session),
            )
        )
    for number in range(COUNT):
        name, seq = f"asleep-{number // SESSION}", number % SESSION
        identity, new = f"{name}:train:{seq}", {"id": f"job-{number:012x}"}
        new["spec"] = job["spec"] | {"stream": job["spec"]["stream"] | {"model": identity}}
        new["state_path"] = job["state_path"].replace(job["id"], new["id"])
        jobs.append(job | new)
        models.append(of_model | {"id": identity, "session": name, "seq": seq, "job": new["id"]})
        sessions += [] if seq else [session | {"id": name}]
        if number in (0, COUNT // 2, COUNT - 1):
            made.append(twin := copy.copy(model))
            twin.id, twin.session = identity, name
            shutil.copytree(service.settings.home / job["state_path"], service.settings.home / new["state_path"])
    with service.db.write() as connection:
        for table, rows in ((t.jobs, jobs), (t.api_models, models), (t.api_sessions, sessions)):
            connection.execute(table.insert(), rows)
    return made


@pytest.mark.nightly  # a service with few models goes the same ways
def test_thousands_sleep_and_cost_nothing(tmp_path, tiny_base, monkeypatch):
    service = TrainingService(tmp_path / "home", tiny_base)
    try:
        model, awake = Model(service), Model(service, owner="ben")
        for _ in range(2):
            model.result(model.rows(ROWS))
            model.result(model.step())
        learned, alone = losses(model), median_s(awake)
        fall_asleep(service, model, monkeypatch)
        twins = multiply(service, model)
        losses(awake)
        assert median_s(awake) < MOST_RATIO * alone + 0.02
        for twin in twins:
            np.testing.assert_allclose(losses(twin), learned, rtol=1e-6)
            twin.ask(f"/sessions/{twin.session}/finish", {})  # its place is free for the next
    finally:
        service.close()
