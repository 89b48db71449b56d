"""Counts compiled programs, and programs from jax's compilation cache; how long that took."""

from __future__ import annotations

import jax.monitoring

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
LOWERING, COMPILING = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts while it is entered, in all threads of the process. Without a cache it counts nothing.

    Attributes:
        compiled: number of programs missing in the cache.
        from_cache: number of programs found in the cache.
        lowering_s: seconds of Python that turned traced programs and their kernels into MLIR.
        compiling_s: seconds in XLA, or of loading from the cache. Threads that compile side by side add up.
    """

    def __init__(self) -> None:
        self.compiled, self.from_cache = 0, 0
        self.lowering_s, self.compiling_s = 0.0, 0.0

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *problem: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.lowering_s += duration_secs * (event == LOWERING)
        self.compiling_s += duration_secs * (event == COMPILING)

    def _count(self, event: str, **_: object) -> None:
        self.compiled += event == MISS
        self.from_cache += event == HIT
