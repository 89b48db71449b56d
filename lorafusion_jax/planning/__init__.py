"""Plans and predictions that are made before a device is used. Never imports jax."""
