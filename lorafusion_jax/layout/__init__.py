"""What a decoder layer consists of and where it may be cut. Plain Python: imports neither jax nor another room."""
