"""The norm in Pallas's Triton lowering."""
