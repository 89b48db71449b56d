"""Counts compiled programs, and programs from jax's compilation cache."""

from __future__ import annotations

import jax.monitoring

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


class CompileCounter:
    """Counts while it is entered, in all threads of the process. Without a cache it counts nothing.

    Attributes:
        compiled: number of programs missing in the cache.
        from_cache: number of programs found in the cache.
    """

    def __init__(self) -> None:
        self.compiled, self.from_cache = 0, 0

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *problem: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)

    def _count(self, event: str, **_: object) -> None:
        self.compiled += event == MISS
        self.from_cache += event == HIT
