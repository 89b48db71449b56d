"""The memory model: bytes per stage, by purpose, before any device is used.

Everything is counted from shapes. `NOT_MODELLED` lists what only the compiler or driver knows.
"""

from lorafusion_jax.planning.memory.calls import kernels_run as kernels_run
from lorafusion_jax.planning.memory.calls import site_shape as site_shape
from lorafusion_jax.planning.memory.peak import ALLOCATOR_USABLE as ALLOCATOR_USABLE
from lorafusion_jax.planning.memory.peak import DEVICE_BYTES as DEVICE_BYTES
from lorafusion_jax.planning.memory.peak import GIB as GIB
from lorafusion_jax.planning.memory.peak import NOT_MODELLED as NOT_MODELLED
from lorafusion_jax.planning.memory.peak import USABLE as USABLE
from lorafusion_jax.planning.memory.peak import StageMemory as StageMemory
from lorafusion_jax.planning.memory.peak import advice as advice
from lorafusion_jax.planning.memory.peak import choose_remat as choose_remat
from lorafusion_jax.planning.memory.peak import fits as fits
from lorafusion_jax.planning.memory.peak import largest_capacity as largest_capacity
from lorafusion_jax.planning.memory.peak import most_halves as most_halves
from lorafusion_jax.planning.memory.peak import stage_memory as stage_memory
from lorafusion_jax.planning.memory.problem import MemoryProblem as MemoryProblem
from lorafusion_jax.planning.memory.problem import memory_problem as memory_problem
from lorafusion_jax.planning.memory.stored import kernel_bytes as kernel_bytes
from lorafusion_jax.planning.memory.stored import layer_bytes as layer_bytes
from lorafusion_jax.planning.memory.stored import trainable_parameters as trainable_parameters
from lorafusion_jax.planning.memory.working import kept_per_layer as kept_per_layer
from lorafusion_jax.planning.memory.working import working_memory as working_memory
