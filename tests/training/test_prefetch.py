"""The assembling thread: order, errors where they belong, no thread left behind."""

import threading
import time

import pytest

from lorafusion_jax.session.loop import prefetch


def test_results_come_in_order():
    assert list(prefetch(lambda n: n * n, range(50))) == [n * n for n in range(50)]


def test_an_error_comes_where_its_result_would_have_been():
    def make(n):
        if n == 3:
            raise ValueError("row 3")
        return n

    results = []
    with pytest.raises(ValueError, match="row 3"):
        results.extend(iter(prefetch(make, range(10))))
    running = prefetch(make, range(10))
    assert [next(running), next(running), next(running)] == [0, 1, 2]
    with pytest.raises(ValueError, match="row 3"):
        next(running)


def test_work_is_done_ahead_but_not_without_bound():
    made = []
    running = prefetch(lambda n: made.append(n) or n, range(100), depth=2)
    next(running)
    while len(made) < 4:  # one was taken, two wait, one is offered
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(made) == 4
    running.close()


def test_closing_early_ends_the_thread():
    running = prefetch(lambda n: n, range(1000))
    next(running)
    running.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "assemble"]
