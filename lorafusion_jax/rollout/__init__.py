"""Rewards of sampled answers and their advantages. Never imports jax."""
