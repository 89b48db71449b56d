"""Autotuner of tile sizes, and its tables."""
