"""The worker process: one live session, told what to do by the server. The only part that imports jax."""
