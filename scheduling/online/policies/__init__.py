"""Scheduling policies: ours, and baselines to compare with."""
