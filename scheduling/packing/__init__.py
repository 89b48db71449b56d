"""Filling slots: the problem as plain numbers, a greedy filler, search, and an exact solver."""
