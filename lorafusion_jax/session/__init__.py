"""A session: a base model on its devices, and the adapters that train on it."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lorafusion_jax.config.places import Places as Places
    from lorafusion_jax.session.adapter_state import AdapterState as AdapterState
    from lorafusion_jax.session.session import Session as Session
    from lorafusion_jax.session.task import Task as Task
    from lorafusion_jax.session.windows import WindowPlanner as WindowPlanner

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
