"""Reports of a run: events, metrics files, the live screen, trackers. Never imports jax."""
