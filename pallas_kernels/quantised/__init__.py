"""Frozen weights in fewer bytes that products read as they are."""
