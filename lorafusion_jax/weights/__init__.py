"""Storage formats of frozen weights. Never imports jax."""
