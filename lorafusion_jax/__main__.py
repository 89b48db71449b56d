"""`python -m lorafusion_jax` runs the command line without an installed package."""

from lorafusion_jax.cli import main

main()
