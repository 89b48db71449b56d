"""Packing of samples into slots: greedy pass, beam search, exact solver, and balancing of the result."""
