"""A small problem for Hopper's kernels, and the context that interprets them on a CPU."""

import contextlib
import sys

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from host_arrays import on_device
from jax._src import config as jax_config
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import triton_call
from pallas_kernels.linear import describe

RANK, ADAPTERS, COLUMNS = 16, 2, 512
BLOCKS = np.array([1, 0, 2, 1, 1], np.int32)  # 2: padding rows
OWNER = np.repeat(BLOCKS, 64)
BF16 = 4e-3  # one rounding


@contextlib.contextmanager
def interpreted():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=2, platform="gpu")
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        yield


def normal(seed, *shape):
    return on_device(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def by_adapter(partials, chunks, adapter):
    return np.asarray(partials)[np.asarray(chunks.adapter) == adapter].sum(0)


def interpret_whole_ops(monkeypatch) -> None:
    """Lets ops of several kernels be interpreted: Triton kernels have an interpreter of their own."""
    call = triton_call.call

    def in_its_own_interpreter(*args, **kwargs):
        forced = jax_config.pallas_tpu_interpret_mode_context_manager
        before = forced.swap_local(None)
        try:
            return call(*args, **kwargs)
        finally:
            forced.set_local(before)

    monkeypatch.setattr(describe, "interprets", lambda: True)
    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels.") and getattr(module, "call", None) is call:
            monkeypatch.setattr(module, "call", in_its_own_interpreter)
