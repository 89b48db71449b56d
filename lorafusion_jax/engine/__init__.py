"""Live sessions: a warm base model with places in which adapters start and stop while others train."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lorafusion_jax.config.places import Places as Places
    from lorafusion_jax.engine.session import LiveSession as LiveSession
    from lorafusion_jax.engine.state import AdapterState as AdapterState
    from lorafusion_jax.engine.task import Task as Task

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
