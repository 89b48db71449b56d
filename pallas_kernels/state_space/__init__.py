"""Selective state spaces (Mamba-2) over packed rows."""

from pallas_kernels.state_space.xla import state_space as state_space
