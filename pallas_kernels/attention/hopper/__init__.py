"""Packed causal attention on Hopper (sm_90), in Pallas's Mosaic GPU lowering."""
