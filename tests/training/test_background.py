"""Work on the writer's thread: in order, told on the caller's thread, and nothing more after a failure."""

from __future__ import annotations

import threading

import pytest

from lorafusion_jax.training.exports import BackgroundQueue


def test_nothing_is_done_after_a_failure_and_the_first_one_is_raised():
    queue, begun, done = BackgroundQueue("test"), threading.Event(), []

    def full():
        begun.wait(30)
        raise OSError("no space")

    queue.submit(lambda: "first", done.append)
    queue.submit(full, done.append)
    queue.submit(lambda: done.append("written after the failure"), lambda _: None)
    begun.set()
    with pytest.raises(OSError, match="no space"):
        queue.poll(wait=True)
    queue.close()
    assert done == ["first"]
