"""A session: a base model on its devices, and the adapters that train on it."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lorafusion_jax.config.places import Places as Places
    from lorafusion_jax.session.adapter_state import AdapterState as AdapterState
    from lorafusion_jax.session.live_session import LiveSession as LiveSession
    from lorafusion_jax.session.task import Task as Task

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
