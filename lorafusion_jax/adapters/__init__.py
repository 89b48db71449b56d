"""Adapters: their specification, their kinds, initial values and low-rank pairs. Planning uses them without jax."""
