"""Times of a stage are those of its passes alone."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.pipeline.stage import Stage

PAUSE_S = 0.2


def test_making_what_other_stages_would_send_is_not_timed():
    def slow(*arguments):
        time.sleep(PAUSE_S)
        return jnp.zeros(2)

    def quick(*arguments):
        return jnp.zeros(2)

    middle = SimpleNamespace(weights=SimpleNamespace(embed=None, head=None), noise=slow, forward=quick, backward=quick)
    Stage.run_alone(middle, None)  # compiles
    assert max(Stage.run_alone(middle, None)) < PAUSE_S
    middle.forward = slow
    forward, backward = Stage.run_alone(middle, None)
    assert backward < PAUSE_S <= forward


def test_stages_are_timed_on_numbers_that_draw_power():
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stage = SimpleNamespace(
        _parts=SimpleNamespace(model=SimpleNamespace(hidden_size=64), dtype=jnp.bfloat16),
        mesh=SimpleNamespace(by_replica=single),
    )
    noise = Stage.noise(stage, SimpleNamespace(tokens=np.zeros((1, 128), np.int32)))
    assert noise.shape == (1, 128, 64)
    assert noise.dtype == jnp.bfloat16
    assert 0.9 < np.asarray(noise, np.float32).std() < 1.1
