"""The gate of the MLP in Pallas's Triton lowering."""
