"""Packed causal attention for Hopper (sm_90), by Pallas' Mosaic GPU lowering."""
