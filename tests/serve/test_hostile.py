"""Random requests from the description of the API find no defect; `campaigns.hostile_requests` sends more."""

from __future__ import annotations

from campaigns.hostile_requests import attack

CASES = 150


def test_random_requests_find_no_defect(running, job):
    statuses = attack(running, job, CASES)
    assert statuses.total() >= CASES
    assert {200, 401, 422} <= statuses.keys()
