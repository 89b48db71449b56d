"""Pallas-Triton kernels (sm_80 and newer)."""
