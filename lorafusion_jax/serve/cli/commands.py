"""What `lorafusion` gains from this package; found by name, because that package does not import this one."""

COMMANDS = {
    "serve": "lorafusion_jax.serve.cli.serve:command",
    "backup": "lorafusion_jax.serve.cli.backup:command",
    "jobs": "lorafusion_jax.serve.cli.jobs:app",
    "keys": "lorafusion_jax.serve.cli.keys:app",
}
