"""Which versions of jax interpret kernels for Hopper on a CPU."""

import jax
import pytest

needs_gpu_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="jax 0.11.1's GPU interpreter refuses loads inside loops and waits forever at some barriers",
)
