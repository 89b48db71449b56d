"""The MLP as one op on Hopper (sm_90)."""
