"""Times of a stage are those of its passes alone."""

import time
from types import SimpleNamespace

import jax.numpy as jnp

from lorafusion_jax.pipeline.stage import Stage

PAUSE_S = 0.2


def test_making_what_other_stages_would_send_is_not_timed():
    def slow(*arguments):
        time.sleep(PAUSE_S)
        return jnp.zeros(2)

    def quick(*arguments):
        return jnp.zeros(2)

    middle = SimpleNamespace(weights=SimpleNamespace(embed=None, head=None), zeros=slow, forward=quick, backward=quick)
    Stage.run_alone(middle, None)  # compiles
    assert max(Stage.run_alone(middle, None)) < PAUSE_S
    middle.forward = slow
    forward, backward = Stage.run_alone(middle, None)
    assert backward < PAUSE_S <= forward
