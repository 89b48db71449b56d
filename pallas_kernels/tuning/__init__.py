"""Tile sizes: heuristics, and tables of what measured fastest."""
