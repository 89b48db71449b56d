"""What a turn of a conversation has computed serves the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorafusion_jax.generation.engine import Engine
    from lorafusion_jax.generation.slots import Sampler


class Conversation:
    """An engine between two calls of a `Generator`. Its blocks hold the beginnings of the next prompts.

    Attributes:
        samplers: by adapter.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.samplers: dict[int, Sampler] = {}

    def forget(self) -> None:
        """Frees the engine."""
        self.engine, self.samplers = None, {}
