"""Commands of the service. `lorafusion` finds them by name, because its rooms do not import this one."""

COMMANDS = {
    "serve": "lorafusion_jax.serve.cli.serve:command",
    "backup": "lorafusion_jax.serve.cli.keys:backup",
    "jobs": "lorafusion_jax.serve.cli.jobs:app",
    "keys": "lorafusion_jax.serve.cli.keys:app",
}
