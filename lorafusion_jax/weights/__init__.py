"""How frozen weights are stored, as a table of kinds. Never imports jax."""
