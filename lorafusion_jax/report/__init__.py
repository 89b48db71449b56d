"""What a run tells: events, metrics files, the live screen, trackers. Never imports jax."""
