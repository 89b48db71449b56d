"""Policies that decide who trains with whom: ours, and those it is compared with."""
