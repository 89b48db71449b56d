"""A gated MLP with LoRA on its three projections, as one op."""
