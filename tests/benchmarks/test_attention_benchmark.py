"""The attention benchmark compares arrays of equal shapes; checked without a GPU."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks import attention


def test_kernels_and_api_have_equal_shapes():
    case = attention.CHECKS[0]
    arrays, segments = jax.eval_shape(lambda: case.arrays(0)), case.segments()
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
        alone = jax.eval_shape(functools.partial(attention.both, *attention.RAW["pallas"]), *arrays, segments)
    wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays]
    whole = jax.eval_shape(functools.partial(attention.through_facade, "xla"), *wide, segments)
    assert [x.shape for x in alone] == [x.shape for x in whole]
