"""What `lorafusion` gains from this package; found by name, because that package does not import this one."""

COMMANDS = {
    "serve": "lorafusion_serve.cli.serve:command",
    "backup": "lorafusion_serve.cli.backup:command",
    "jobs": "lorafusion_serve.cli.jobs:app",
    "keys": "lorafusion_serve.cli.keys:app",
}
