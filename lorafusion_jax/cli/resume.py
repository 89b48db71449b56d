"""lorafusion resume: a run folder from its newest checkpoint to the end."""

from __future__ import annotations

from lorafusion_jax.cli.common import RunPath, out, prepare_machine

NAME = "resume"


def command(run: RunPath) -> int:
    """Continues an interrupted run, bitwise as if it had never stopped.

    Example: lorafusion resume runs/exp1
    """
    from lorafusion_jax.cli.running import follow
    from lorafusion_jax.training import RunFolder, resume

    config = RunFolder(run).read_config()
    prepare_machine()
    return follow(out(), run, config, lambda listeners: resume(run, listeners=listeners))
