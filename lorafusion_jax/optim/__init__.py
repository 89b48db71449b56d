"""Optimizers and learning-rate schedules: a table of each, and one adapter's step. The tables do not import jax."""
