"""`python -m lorafusion_jax` is the command line, for machines where the package is not installed."""

from lorafusion_jax.cli import main

main()
