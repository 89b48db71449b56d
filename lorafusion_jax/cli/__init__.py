"""The command line, with one file per command."""

from lorafusion_jax.cli.main import main as main
