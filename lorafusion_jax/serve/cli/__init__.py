"""Commands of the service: serve, jobs, keys."""
