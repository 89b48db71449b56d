"""Runs that are asked for something or killed while they train, and what they leave."""

from __future__ import annotations

import numpy as np

from lorafusion_jax.checkpoint.requests import write_addition, write_request
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder


def asks(run, *requests):
    """A listener: (adapter, step, whom, action, weight or options) is asked for when that adapter has taken that step.

    Of "add", `whom` are the settings of the new adapters.
    """
    waiting = list(requests)

    def listen(event):
        for request in [
            request_of_event
            for request_of_event in waiting
            if event.kind == "step" and request_of_event[:2] == (event.adapter, event.step)
        ]:
            waiting.remove(request)
            _, _, whom, action, *more = request
            if action == "add":
                write_addition(run, whom)
            elif more and isinstance(more[0], dict):
                write_request(run, action, whom, **more[0])
            else:
                write_request(run, action, whom, *more)

    return listen


def crash_after(kind, count=1):
    """A listener that ends the process' work as a kill would, right after the news."""
    seen = []

    def listen(event):
        seen.extend([event] if event.kind == kind else [])
        if event.kind == kind and len(seen) == count:
            raise KeyboardInterrupt

    return listen


def weights_of(run, name):
    arrays = read_adapter(RunFolder(run).latest(name))[1]
    return {f"{path} {part}": array for path, pair in arrays.items() for part, array in zip("AB", pair, strict=True)}


def losses_of(run, name):
    rows = read_rows(run / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step" and row["adapter"] == name}


def events_of(run, *kinds):
    return [row for row in read_rows(run / "events.jsonl") if row["kind"] in kinds]


def assert_same_numbers(run, reference, names, atol=2e-5):
    for name in names:
        expected = weights_of(reference, name)
        for key, array in weights_of(run, name).items():
            np.testing.assert_allclose(array, expected[key], rtol=0, atol=atol, err_msg=f"{name} {key}")
        losses, others = losses_of(run, name), losses_of(reference, name)
        assert losses.keys() == others.keys()
        np.testing.assert_allclose(list(losses.values()), list(others.values()), rtol=0, atol=10 * atol)


def statuses(result):
    return {name: adapter.status for name, adapter in result.adapters.items()}
