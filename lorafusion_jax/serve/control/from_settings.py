"""What settings of the service choose: who decides where jobs train, and what starts workers."""

from __future__ import annotations

from lorafusion_jax.errors import ConfigError, install_line
from lorafusion_jax.serve.control.launch import Launcher, LocalLauncher
from lorafusion_jax.serve.control.scheduler import OneSession, Scheduler
from lorafusion_jax.serve.settings import ONE_SESSION, Settings


def make_scheduler(settings: Settings) -> Scheduler:
    """Returns the scheduler that the settings name."""
    if settings.policy == ONE_SESSION:
        return OneSession(settings)
    from lorafusion_jax.serve.control.policy_scheduler import PolicyScheduler  # imports take a while

    return PolicyScheduler(settings, settings.policy)


def make_launcher(settings: Settings, server: str) -> Launcher:
    """Returns what starts workers: this machine, or a Ray cluster.

    Args:
        server: where workers connect.

    Raises:
        ConfigError: `serve.ray`, the cluster cannot be used.
    """
    if settings.ray is None:
        return LocalLauncher(server)
    try:
        from lorafusion_jax.serve.control.ray_launcher import RayLauncher

        return RayLauncher(settings.ray, settings.home, settings.gpus)
    except (ImportError, ConnectionError, RuntimeError, ValueError) as problem:
        fix = f"{install_line('ray')}, and ray start --head on one node"
        message = f"the Ray cluster {settings.ray} cannot be used."
        raise ConfigError("serve.ray", message, why=str(problem).splitlines()[0], fix=fix) from None
