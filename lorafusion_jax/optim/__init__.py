"""Optimizers and learning-rate schedules as tables, and the optimizer step of one adapter."""
