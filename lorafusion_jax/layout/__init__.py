"""Description of a decoder layer and of the layers of a stage. Plain Python, without jax."""
