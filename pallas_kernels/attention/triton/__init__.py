"""Packed causal attention in Pallas's Triton lowering (sm_80 and newer)."""
