"""Mosaic GPU kernels (Hopper, sm_90)."""
