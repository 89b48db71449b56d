"""Linear layers on Hopper (sm_90), in Pallas's Mosaic GPU lowering. Imports nothing of `linear.triton`."""
