"""Selective state spaces (Mamba-2) over packed rows."""

from pallas_kernels.state_space.xla import state_space as state_space
from pallas_kernels.state_space.xla import state_space_step as state_space_step
from pallas_kernels.state_space.xla import state_space_with_states as state_space_with_states
