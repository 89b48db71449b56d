"""Kinds of adapters as tables of their trainable tensors. Never imports jax."""
