"""Live sessions: a warm base model with places in which adapters start and stop while others train."""

from lorafusion_jax.engine.places import Places as Places
from lorafusion_jax.engine.session import LiveSession as LiveSession
from lorafusion_jax.engine.state import AdapterState as AdapterState
from lorafusion_jax.engine.task import Task as Task
