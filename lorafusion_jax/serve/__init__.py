"""A training service: jobs in, adapters out, over REST. Importable without jax, but for `worker/`."""
