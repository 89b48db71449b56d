"""Everything about a run that is decided or predicted before a device is touched. Never imports jax."""
