"""Products of decoding, where every row has an adapter of its own."""
