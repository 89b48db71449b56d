"""The memory model: bytes per stage, by purpose, before any device is used.

Everything is counted from shapes. `NOT_MODELLED` lists what only the compiler or driver knows.
"""

from lorafusion_jax.planning.memory.calls import kernels_run, site_shape
from lorafusion_jax.planning.memory.peak import (
    ALLOCATOR_USABLE,
    DEVICE_BYTES,
    GIB,
    NOT_MODELLED,
    USABLE,
    StageMemory,
    advice,
    choose_remat,
    fits,
    largest_capacity,
    most_halves,
    stage_memory,
)
from lorafusion_jax.planning.memory.problem import MemoryProblem, memory_problem
from lorafusion_jax.planning.memory.stored import kernel_bytes, layer_bytes, trainable_parameters
from lorafusion_jax.planning.memory.working import kept_per_layer, working_memory

__all__ = [
    "ALLOCATOR_USABLE",
    "DEVICE_BYTES",
    "GIB",
    "NOT_MODELLED",
    "USABLE",
    "MemoryProblem",
    "StageMemory",
    "advice",
    "choose_remat",
    "fits",
    "kept_per_layer",
    "kernel_bytes",
    "kernels_run",
    "largest_capacity",
    "layer_bytes",
    "memory_problem",
    "most_halves",
    "site_shape",
    "stage_memory",
    "trainable_parameters",
    "working_memory",
]
