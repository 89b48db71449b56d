"""Generates text with a base model and several of its adapters in one batch, with a cache of keys and values."""
