"""Passes around products of 8-bit floats, in Pallas's Triton lowering."""
